"""Makes layers visible to the code: links their files into the volume that the code's container mounts read-only.

A pod cannot mount an overlay for its code, as a host does. So the files of all layers are merged into one directory; a
later layer wins, as the uppermost of an overlay does.
"""

import errno
import os
import secrets
import shutil
from pathlib import Path

_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)


def publish_layer(layer: Path, target: Path) -> None:
    """Merge a verified layer, which holds directories and plain files only, into `target`. Raises OSError."""
    for folder, folders, files in os.walk(layer):
        place = target / Path(folder).relative_to(layer)
        for name in folders:
            _make_directory(place / name)
        for name in files:
            _link(Path(folder, name), place / name)
    now = None  # Python caches listings of directories by their times
    for folder, _, _ in os.walk(layer):
        os.utime(target / Path(folder).relative_to(layer), now)


def _make_directory(path: Path) -> None:
    if not path.is_dir():
        path.unlink(missing_ok=True)
        path.mkdir(mode=0o755)


def _link(source: Path, target: Path) -> None:
    """Put a file in its place at once: running code may be reading there."""
    if target.is_dir():
        shutil.rmtree(target)
    temporary = target.with_name(f".{secrets.token_hex(8)}")
    try:
        os.link(source, temporary)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        shutil.copy2(source, temporary)
    os.rename(temporary, target)
