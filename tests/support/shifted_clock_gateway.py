"""`fumehood serve` whose clock is late or early by what a file says, for what happens after a while.

Run as a program, with the same arguments as `fumehood`; LATE_BY names the file, with a number of seconds in it.
"""

import os
import time
from pathlib import Path

from fumehood import wiring
from fumehood.cli import main


def _now(self: wiring.SystemClock) -> float:
    _ = self
    return time.time() + float(Path(os.environ["LATE_BY"]).read_text())


if __name__ == "__main__":
    wiring.SystemClock.now = _now
    main()
