"""What `doctor` finds about packages: the installer, its index, what is kept; imports `protocol` and siblings."""

from fumehood.protocol.sandbox_errors import InstallFailed
from fumehood.sandboxd import bytecode
from fumehood.sandboxd.disks import in_words
from fumehood.sandboxd.findings import Finding
from fumehood.sandboxd.packages.opening import packages_directory
from fumehood.sandboxd.runtime import discover_runtime
from fumehood.sandboxd.settings import Settings
from fumehood.sandboxd.supervisor import Supervisor

_NAME = "packages"
_BYTECODE_ADVICE = (
    "Sandboxes work, but import their packages slowly. Let Fumehood keep bytecode: set packages_dir (or "
    "FUMEHOOD_PACKAGES_DIR) to a directory that this user alone can write. Or compile where the packages are "
    "installed: `uv pip install --compile-bytecode …`, or `python -m compileall DIRECTORY`."
)
_SECONDS = 20.0
_ADVICE = (
    "Let this machine reach the index, name another one (index_url, FUMEHOOD_INDEX_URL) or a directory of wheels "
    "(find_links); or set packages to false."
)


async def look(supervisor: Supervisor, settings: Settings) -> Finding:
    """Whether sandboxes can have further packages: never a reason not to run code, at most a warning."""
    if not settings.packages:
        return Finding(_NAME, "ok", "off: nobody can have any installed")
    installer = supervisor.installer
    if installer is None:
        advice = "Nothing, if the usual ones are enough; set packages to false to say so."
        return Finding(_NAME, "warning", supervisor.no_packages, advice)
    count, size = installer.store.kept()
    kept = f"{count} sets of packages ({in_words(size)}) are kept in {installer.store.path}"
    try:
        await installer.reach_index(_SECONDS)
    except InstallFailed as error:
        return Finding(
            _NAME, "warning", f"{error.message} What was fetched before still serves: {kept}.", _ADVICE
        )
    return Finding(_NAME, "ok", f"the index answers; {kept}")


def look_at_bytecode(settings: Settings) -> Finding:
    """Whether sandboxes find bytecode of their packages; raises RuntimeUnavailable."""
    runtime = discover_runtime()
    uncompiled = bytecode.find_uncompiled(runtime)
    if not uncompiled:
        return Finding("bytecode", "ok", "beside the packages")
    names = sum(len(names) for _, names in uncompiled)
    if settings.mode != "namespaces":
        return Finding("bytecode", "warning", f"missing for {names} packages", _BYTECODE_ADVICE)
    try:
        tree = bytecode.prepare(runtime, packages_directory(settings))
    except bytecode.BytecodeUnavailable as error:
        return Finding("bytecode", "warning", f"missing for {names} packages: {error}", _BYTECODE_ADVICE)
    return Finding("bytecode", "ok", f"compiled by Fumehood, in {tree}")
