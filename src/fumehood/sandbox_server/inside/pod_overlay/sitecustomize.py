"""Puts the packages that are attached to a pod on the path, before those of the image, in every Python of the code."""

import sys

_ATTACHED = "/opt/packages"  # as layout.ATTACHED_PACKAGES; programs import nothing of Fumehood

if _ATTACHED not in sys.path:
    _directories = (n for n, path in enumerate(sys.path) if path.endswith(("site-packages", "dist-packages")))
    sys.path.insert(next(_directories, len(sys.path)), _ATTACHED)
