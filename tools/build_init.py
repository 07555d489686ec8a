"""Assembles the init program of sandboxes. Needs `as`; run it after each change of tools/init.x86_64.s.

python tools/build_init.py [TARGET]
"""

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
TARGET = HERE.parent / "src/fumehood/sandbox_server/inside/init.x86_64"


def build(target: Path) -> None:
    """Assemble the program into `target`."""
    with tempfile.TemporaryDirectory() as directory:
        compiled = Path(directory) / "init.o"
        subprocess.run(["as", "--64", "-o", compiled, HERE / "init.x86_64.s"], check=True)
        subprocess.run(["objcopy", "-O", "binary", "-j", ".text", compiled, target], check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
