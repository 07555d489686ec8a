"""What every sandbox has already: Python, platform, packages.

uv is told of these packages as constraints, and finds each as a wheel that has metadata only: so it can resolve
against them whether or not the index has them, and without fetching anything.
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
class BaseEnvironment:
    """What every sandbox has installed from the beginning.

    find: looks for it when it is first needed; that takes a while, and not every server is asked for packages.
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
        """Names this Python with these packages: a layer is used only with what it was built for."""
        about = [
            platform.python_version(),
            platform.python_implementation(),
            sysconfig.get_platform(),
            platform.libc_ver(),
            sorted(self.versions.items()),
        ]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()

    @functools.cached_property
    def stub_wheels(self) -> dict[str, bytes]:
        """File name and content of a wheel for each, with its metadata and nothing else."""
        made: dict[str, bytes] = {}
        for name, distribution in self.distributions.items():
            metadata = distribution.read_text("METADATA")
            if metadata is None:
                continue
            stem = f"{canonicalize_name(name).replace('-', '_')}-{_wheel_version(distribution.version)}"
            content = io.BytesIO()
            with zipfile.ZipFile(content, "w") as archive:
                for member, text in (("METADATA", metadata), ("WHEEL", _WHEEL_METADATA), ("RECORD", "")):
                    archive.writestr(zipfile.ZipInfo(f"{stem}.dist-info/{member}"), text)
            made[f"{stem}-py3-none-any.whl"] = content.getvalue()
        return made

    def write_stub_wheels(self, directory: Path) -> None:
        directory.mkdir(mode=0o755)
        for name, content in self.stub_wheels.items():
            (directory / name).write_bytes(content)


def _wheel_version(version: str) -> str:
    return canonicalize_version(version, strip_trailing_zero=False).replace("-", "_")
