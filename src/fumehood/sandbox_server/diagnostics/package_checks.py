"""What `doctor` finds about packages: the installer, its index, what is kept."""

from fumehood.protocol.sandbox.sandbox_errors import InstallFailed
from fumehood.sandbox_server.diagnostics.findings import HostFinding
from fumehood.sandbox_server.host.disks import format_size
from fumehood.sandbox_server.host.python_runtime import discover_runtime
from fumehood.sandbox_server.packages import bytecode_cache
from fumehood.sandbox_server.packages.installer_factory import packages_directory
from fumehood.sandbox_server.settings import Settings
from fumehood.sandbox_server.supervisor.supervisor import Supervisor

_NAME = "packages"
_BYTECODE_ADVICE = (
    "Sandboxes work, but import their packages slowly. Let Fumehood keep bytecode: set packages_dir (or "
    "FUMEHOOD_PACKAGES_DIR) to a directory that this user alone can write. Or compile where the packages are "
    "installed: `uv pip install --compile-bytecode …`, or `python -m compileall DIRECTORY`."
)
_INDEX_TIMEOUT = 20.0
_ADVICE = (
    "Let this machine reach the index, name another one (index_url, FUMEHOOD_INDEX_URL) or a directory of wheels "
    "(find_links); or set packages to false."
)


async def check_packages(supervisor: Supervisor, settings: Settings) -> HostFinding:
    """Whether sandboxes can have further packages: never a reason not to run code, at most a warning."""
    if not settings.packages:
        return HostFinding(_NAME, "ok", "off: nobody can have any installed")
    installer = supervisor.installer
    if installer is None:
        advice = "Nothing, if the usual ones are enough; set packages to false to say so."
        return HostFinding(_NAME, "warning", supervisor.packages_unavailable, advice)
    count, size = installer.store.usage()
    kept = f"{count} sets of packages ({format_size(size)}) are kept in {installer.store.path}"
    try:
        await installer.check_index(_INDEX_TIMEOUT)
    except InstallFailed as error:
        return HostFinding(
            _NAME, "warning", f"{error.message} What was fetched before still serves: {kept}.", _ADVICE
        )
    return HostFinding(_NAME, "ok", f"the index answers; {kept}")


def check_bytecode(settings: Settings) -> HostFinding:
    """Whether sandboxes find bytecode of their packages; raises RuntimeUnavailable."""
    runtime = discover_runtime()
    uncompiled = bytecode_cache.find_uncompiled(runtime)
    if not uncompiled:
        return HostFinding("bytecode", "ok", "beside the packages")
    names = sum(len(names) for _, names in uncompiled)
    if settings.mode != "namespaces":
        return HostFinding("bytecode", "warning", f"missing for {names} packages", _BYTECODE_ADVICE)
    try:
        tree = bytecode_cache.prepare_bytecode(runtime, packages_directory(settings))
    except bytecode_cache.BytecodeUnavailable as error:
        return HostFinding("bytecode", "warning", f"missing for {names} packages: {error}", _BYTECODE_ADVICE)
    return HostFinding("bytecode", "ok", f"compiled by Fumehood, in {tree}")
