"""Imports and warms what most programs use, once, before any fork; imports only the standard library until it runs."""

import gc
import importlib
import io
import os
import sys
import warnings
from typing import Any

from fumehood.sandboxd.inside import immortal

# What a first data frame or chart would import lazily, after the modules that bring it.
_LAZY: dict[str, tuple[str, ...]] = {
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
    """Import each package that is there; what failed maps to its reason.

    Imported only: code that starts threads (OpenMP, polars) hangs in the forks if it ran before them.
    """
    problems: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ["", *names]:
            for module in (name, *_LAZY.get(name, ())):
                if module:
                    _import(module, problems)
        if "matplotlib.pyplot" in sys.modules:
            _warm_charts()
    return problems


def freeze(*, for_many: bool) -> None:
    """What the forks share stays shared: neither its use nor a later collection is to touch its pages."""
    if "matplotlib.font_manager" in sys.modules:
        # matplotlib forgets open fonts in every fork, which takes long; so there are none.
        fonts: Any = sys.modules["matplotlib.font_manager"]
        fonts._get_font.cache_clear()
    gc.collect()
    if for_many:
        immortal.make_immortal()
    gc.freeze()


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _import(module: str, problems: dict[str, str]) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:
        problems[module] = f"{type(error).__name__}: {error}"


def _warm_charts() -> None:
    """Draw once, so that fonts are found and the font list is written to the cache."""
    pyplot: Any = sys.modules["matplotlib.pyplot"]
    figure = pyplot.figure()
    axes = figure.add_subplot()
    axes.plot([1, 2, 3], [2.0, 1.0, 3.0], label="a")
    axes.bar([1, 2], [1, 2])
    axes.legend()
    axes.set_title("warm")
    figure.savefig(io.BytesIO(), format="png")
    pyplot.close("all")
