"""Creates the layer store and the installer from settings."""

import importlib
import itertools
import os
from pathlib import Path

from fumehood.sandbox_server.host.cgroups import CgroupTree
from fumehood.sandbox_server.host.python_runtime import (
    PythonRuntime,
    PythonRuntimeUnavailable,
    find_sandbox_distributions,
)
from fumehood.sandbox_server.packages.install_jail import InstallJail
from fumehood.sandbox_server.packages.installer import Installer
from fumehood.sandbox_server.packages.layer_store import LayerStore
from fumehood.sandbox_server.packages.package_index_config import PackageIndexConfig
from fumehood.sandbox_server.packages.preinstalled_packages import PreinstalledPackages
from fumehood.sandbox_server.packages.uv_client import UvClient
from fumehood.sandbox_server.packages.uv_container import UvContainer
from fumehood.sandbox_server.settings import SandboxServerSettings


def open_store(settings: SandboxServerSettings) -> LayerStore:
    """Open the layer store. Raises IsolationUnavailable, OSError."""
    store = LayerStore(packages_directory(settings), max_bytes=settings.packages_bytes)
    store.open()
    return store


def packages_directory(settings: SandboxServerSettings) -> Path:
    """Return the absolute directory of installed packages and bytecode; jails start in another directory."""
    return (settings.packages_dir or _default_directory()).absolute()


def _default_directory() -> Path:
    if directory := os.environ.get("FUMEHOOD_PACKAGES_DIR"):
        return Path(directory)
    if os.geteuid() == 0:
        return Path("/var/cache/fumehood/packages")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "fumehood" / "packages"


def open_installer(
    settings: SandboxServerSettings,
    store: LayerStore,
    *,
    runtime: PythonRuntime,
    uid: int | None,
    tree: CgroupTree | None,
) -> Installer:
    """Create the installer. Raises PythonRuntimeUnavailable, OSError.

    uid: as root, the user of install jails.
    """
    jail = InstallJail(
        runtime=runtime,
        uv=_find_uv(),
        index=PackageIndexConfig.from_environment(settings.index_url, settings.find_links),
        cache=store.cache_directory(uid),
        uid=uid,
        tree=tree,
        timeout=settings.install_timeout,
        max_bytes=settings.packages_bytes,
        cgroup_numbers=itertools.count(1),
    )
    return Installer(store, UvClient(jail, PreinstalledPackages(find_sandbox_distributions)))


def open_container_installer(
    directory: Path, settings: SandboxServerSettings, *, max_bytes: int
) -> Installer:
    """Create the installer of the container `egress`. Raises PythonRuntimeUnavailable, IsolationUnavailable, OSError.

    directory: of this container alone; other users cannot enter it.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    directory.chmod(0o700)  # whatever the volume's bits are
    store = LayerStore(directory, max_bytes=max_bytes)
    store.open()
    runner = UvContainer(
        uv=_find_uv(),
        index=PackageIndexConfig.from_environment(settings.index_url, settings.find_links),
        scratch=directory,
        cache=store.cache_directory(None),
        timeout=settings.install_timeout,
        max_bytes=max_bytes,
    )
    return Installer(store, UvClient(runner, PreinstalledPackages(find_sandbox_distributions)))


def _find_uv() -> Path:
    try:
        return Path(importlib.import_module("uv").find_uv_bin())
    except (ImportError, FileNotFoundError) as error:
        raise PythonRuntimeUnavailable(f"packages cannot be installed without uv ({error})") from error
