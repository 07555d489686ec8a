"""Runs a few common programs in the zygote, for all sandboxes at once; imports only the standard library.

The first run of anything costs: lazy imports, caches, and the interpreter's own adaptation of bytecode, all of which
write to memory. Done here they are shared; done in a sandbox each of them is a page that it has to copy first.
"""

import sys
from collections.abc import Callable

_PLAIN = (
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
_TIMES = 4  # so often until the interpreter has adapted


def programs() -> list[str]:
    """What to run, given what is imported."""
    chosen = [source for module, sources in _PROGRAMS.items() if module in sys.modules for source in sources]
    return chosen * _TIMES


def simplest_programs() -> list[str]:
    """What to run last: what they need of the interpreter's small caches, others do not take from them again."""
    return [*_PLAIN] * _TIMES


def forget_lookups() -> None:
    """Python keeps some thousand lookups of attributes; of all that were made, the next ones shall find room.

    A sandbox that does not find one there replaces another: that is a page which it copies.
    """
    forget: Callable[[], None] | None = getattr(sys, "_clear_type_cache", None)
    if forget is not None:
        forget()
