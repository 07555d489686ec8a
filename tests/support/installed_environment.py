"""An environment in which Fumehood is installed, not linked to the source tree.

It is what a wheel gives, without building one: a copy of the package in `site-packages`, a few other distributions
beside it, and the packages of this test run behind them, as in an environment that shares another one's.
"""

import importlib.metadata
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import fumehood

BESIDE = ("h11", "et_xmlfile")  # one of the server's packages and one of the sandbox's


def install(directory: Path, owner: int | None = None) -> Path:
    """Make the environment in `directory` and return its Python; all of it belongs to `owner`."""
    real = Path(os.path.realpath(sys.executable))
    (directory / "bin").mkdir(parents=True)
    python = directory / "bin" / "python"
    python.symlink_to(real)
    (directory / "pyvenv.cfg").write_text(f"home = {real.parent}\ninclude-system-site-packages = false\n")
    site = directory / "lib" / Path(sysconfig.get_path("stdlib")).name / "site-packages"
    site.mkdir(parents=True)
    package = Path(fumehood.__file__).parent
    shutil.copytree(package, site / "fumehood")
    for name in ("fumehood", *BESIDE):
        _copy_distribution(name, site)
    # A path in here is not searched for further .pth files, so the source tree stays out.
    (site / "shared.pth").write_text(f"{sysconfig.get_path('platlib')}\n")
    _open(directory, owner)
    return python


def _copy_distribution(name: str, site: Path) -> None:
    distribution = importlib.metadata.distribution(name)
    for file in distribution.files or ():
        if (
            file.parts[0] in ("..", "__pycache__")
            or file.suffix in (".pth", ".pyc")
            or "direct_url" in file.name
        ):
            continue
        target = site / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(file.locate()), target)


def _open(directory: Path, owner: int | None) -> None:
    for parent, names, files in os.walk(directory):
        for path in (parent, *(os.path.join(parent, name) for name in (*names, *files))):
            if os.path.islink(path):
                continue
            os.chmod(path, 0o755 if os.path.isdir(path) else 0o644)
            if owner is not None:
                os.chown(path, owner, owner)
