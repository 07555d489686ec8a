"""Imports the usual packages and runs warm-up programs, once, before any fork.

Without the programs that use packages a first group-by with pandas takes 1.22 to 1.26 times the CPU time; without the
simple ones and the cleared type cache every sandbox takes 1.05 times. The plain way is to import only.
"""

import gc
import importlib
import io
import sys
import warnings
from collections.abc import Callable
from typing import Any

from fumehood.sandbox_server.inside.warm_start import immortal_objects

# Modules that a first data frame or chart would import lazily, by package.
_LAZY_MODULES: dict[str, tuple[str, ...]] = {
    "": (
        "asyncio",
        "ssl",
        "sqlite3",
        "decimal",
        "csv",
        "zipfile",
        "subprocess",
        "concurrent.futures",
        "hashlib",
    ),
    "numpy": ("numpy.fft", "numpy.linalg", "numpy.random", "numpy.ma", "numpy.polynomial"),
    "pandas": ("pandas.plotting._matplotlib", "pandas.io.formats.style", "pandas.io.formats.html"),
    "pyarrow": ("pyarrow.pandas_compat", "pyarrow.compute"),
    "matplotlib": ("matplotlib.pyplot", "matplotlib.backends.backend_agg", "matplotlib.dates"),
}


def preload(names: list[str]) -> dict[str, str]:
    """Import each installed package; returns the error of each module that failed.

    Nothing is run: code that starts threads (OpenMP, polars) would hang in the forks.
    """
    problems: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ["", *names]:
            for module in (name, *_LAZY_MODULES.get(name, ())):
                if module:
                    _import_module(module, problems)
        if "matplotlib.pyplot" in sys.modules:
            _warm_up_matplotlib()
    return problems


def freeze_objects(*, many_forks: bool) -> None:
    """Keep pages shared: neither use nor garbage collection shall write to existing objects.

    many_forks: also make the objects immortal.
    """
    if "matplotlib.font_manager" in sys.modules:
        # matplotlib closes open fonts in every fork, which is slow; so leave none open.
        fonts: Any = sys.modules["matplotlib.font_manager"]
        fonts._get_font.cache_clear()
    gc.collect()
    if many_forks:
        immortal_objects.make_objects_immortal()
    gc.freeze()


def _import_module(module: str, problems: dict[str, str]) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:
        problems[module] = f"{type(error).__name__}: {error}"


def _warm_up_matplotlib() -> None:
    """Draw once, so that fonts are found and the font list is cached."""
    pyplot: Any = sys.modules["matplotlib.pyplot"]
    figure = pyplot.figure()
    axes = figure.add_subplot()
    axes.plot([1, 2, 3], [2.0, 1.0, 3.0], label="a")
    axes.bar([1, 2], [1, 2])
    axes.legend()
    axes.set_title("warm")
    figure.savefig(io.BytesIO(), format="png")
    pyplot.close("all")


_SIMPLE_PROGRAMS = (
    "print(1 + 1)",
    "1 + 1",
    "x = [n * n for n in range(10)]\nprint(sum(x))\nx",
    "import math\nmath.sqrt(2)",
    "def area(r):\n    return 3 * r * r\nfor r in range(3):\n    print(f'{r}: {area(r):.2f}')",
    "1 / 0",
    "this is no Python",
)
_PROGRAMS: dict[str, tuple[str, ...]] = {
    "numpy": (
        "import numpy as np\na = np.arange(12.0).reshape(3, 4)\nprint(a.mean(), a.sum(axis=0))\na @ a.T",
    ),
    "pandas": (
        (
            "import pandas as pd\n"
            "df = pd.DataFrame({'city': ['a', 'b', 'a', 'c'], 'n': [1, 2, 3, 4], 'x': [0.5, 1.5, 2.5, 3.5]})\n"
            "print(df.groupby('city').sum())\nprint(df.groupby('city')['n'].mean())\ndf.describe()"
        ),
        (
            "import io, pandas as pd\n"
            "df = pd.read_csv(io.StringIO('day,n\\n2024-01-01,1\\n2024-01-02,2\\n'), parse_dates=['day'])\n"
            "print(df.to_string())\ndf['m'] = df.n * 2\nprint(df.sort_values('n').head())\ndf.to_csv(io.StringIO())\ndf"
        ),
    ),
    "matplotlib": (
        (
            "import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nax.plot([1, 2, 3], [2, 1, 3], label='a')\n"
            "ax.bar([1, 2], [1, 2])\nax.legend()\nax.set_title('t')\nplt.show()"
        ),
    ),
}
_REPETITIONS = 4  # until the interpreter has specialised the code


def warm_up_programs() -> list[str]:
    """Return the programs to run for the packages that are imported."""
    chosen = [source for module, sources in _PROGRAMS.items() if module in sys.modules for source in sources]
    return chosen * _REPETITIONS


def simple_warm_up_programs() -> list[str]:
    """Return the programs to run last, so that their entries stay in the interpreter's small caches."""
    return [*_SIMPLE_PROGRAMS] * _REPETITIONS


def clear_type_cache() -> None:
    """Clear Python's cache of attribute lookups, so that the simple programs fill it.

    A sandbox that misses an entry replaces another one, and copies its page.
    """
    clear: Callable[[], None] | None = getattr(sys, "_clear_type_cache", None)
    if clear is not None:
        clear()
