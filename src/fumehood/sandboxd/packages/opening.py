"""Puts the parts of package installation together from settings; imports only siblings and the standard library."""

import importlib
import itertools
import os
from pathlib import Path

from fumehood.sandboxd.cgroups import CgroupTree
from fumehood.sandboxd.packages.base import Base
from fumehood.sandboxd.packages.index import Index
from fumehood.sandboxd.packages.installer import Installer
from fumehood.sandboxd.packages.jail import InstallJail
from fumehood.sandboxd.packages.resolving import Resolver
from fumehood.sandboxd.packages.store import Store
from fumehood.sandboxd.runtime import Runtime, RuntimeUnavailable, sandbox_distributions
from fumehood.sandboxd.settings import Settings


def open_store(settings: Settings) -> Store:
    store = Store(packages_directory(settings), most_bytes=settings.packages_bytes)
    store.open()
    return store


def packages_directory(settings: Settings) -> Path:
    """Where installed packages and bytecode are kept; absolute, since jails are made in another directory."""
    return (settings.packages_dir or _default_directory()).absolute()


def _default_directory() -> Path:
    if chosen := os.environ.get("FUMEHOOD_PACKAGES_DIR"):
        return Path(chosen)
    if os.geteuid() == 0:
        return Path("/var/cache/fumehood/packages")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "fumehood" / "packages"


def open_installer(
    settings: Settings,
    store: Store,
    *,
    runtime: Runtime,
    uid: int | None,
    tree: CgroupTree | None,
) -> Installer:
    """uid: as root, the kernel user of install jails; raises RuntimeUnavailable, OSError."""
    jail = InstallJail(
        runtime=runtime,
        uv=_find_uv(),
        index=Index.find(settings.index_url, settings.find_links),
        cache=store.cache(uid),
        uid=uid,
        tree=tree,
        timeout=settings.install_timeout,
        most_bytes=settings.packages_bytes,
        numbers=itertools.count(1),
    )
    return Installer(store, Resolver(jail, Base(sandbox_distributions)))


def _find_uv() -> Path:
    try:
        return Path(importlib.import_module("uv").find_uv_bin())
    except (ImportError, FileNotFoundError) as error:
        raise RuntimeUnavailable(f"packages cannot be installed without uv ({error})") from error
