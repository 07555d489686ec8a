"""What every sandbox has from the start: Python, platform, packages.

uv gets these packages as constraints, and each as a stub wheel with metadata only. So it can resolve against them
without downloads, even if the index does not have them.
"""

import functools
import hashlib
import io
import json
import platform
import sysconfig
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

from packaging.utils import canonicalize_name, canonicalize_version

_WHEEL_METADATA = "Wheel-Version: 1.0\nGenerator: fumehood\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@dataclass(frozen=True)
class PreinstalledPackages:
    """The packages that every sandbox has from the start.

    find_distributions: called on first use, since it is slow and not every server installs packages.
    """

    find_distributions: Callable[[], Mapping[str, Distribution]]

    @functools.cached_property
    def distributions(self) -> Mapping[str, Distribution]:
        return self.find_distributions()

    @functools.cached_property
    def versions(self) -> dict[str, str]:
        return {canonicalize_name(name): item.version for name, item in self.distributions.items()}

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of this Python and these packages: a layer is used only with what it was built for."""
        facts = [
            platform.python_version(),
            platform.python_implementation(),
            sysconfig.get_platform(),
            platform.libc_ver(),
            sorted(self.versions.items()),
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @functools.cached_property
    def stub_wheels(self) -> dict[str, bytes]:
        """A wheel for each package with its metadata and nothing else: content by file name."""
        wheels: dict[str, bytes] = {}
        for name, distribution in self.distributions.items():
            metadata = distribution.read_text("METADATA")
            if metadata is None:
                continue
            stem = f"{canonicalize_name(name).replace('-', '_')}-{_wheel_version(distribution.version)}"
            content = io.BytesIO()
            with zipfile.ZipFile(content, "w") as archive:
                for member, text in (("METADATA", metadata), ("WHEEL", _WHEEL_METADATA), ("RECORD", "")):
                    archive.writestr(zipfile.ZipInfo(f"{stem}.dist-info/{member}"), text)
            wheels[f"{stem}-py3-none-any.whl"] = content.getvalue()
        return wheels

    def write_stub_wheels(self, directory: Path) -> None:
        """Write the stub wheels into a new directory."""
        directory.mkdir(mode=0o755)
        for name, content in self.stub_wheels.items():
            (directory / name).write_bytes(content)


def _wheel_version(version: str) -> str:
    return canonicalize_version(version, strip_trailing_zero=False).replace("-", "_")
