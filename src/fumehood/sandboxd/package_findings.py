"""What `doctor` finds about packages: the installer, its index, what is kept; imports `protocol` and siblings."""

from fumehood.protocol.sandbox_errors import InstallFailed
from fumehood.sandboxd.disks import in_words
from fumehood.sandboxd.findings import Finding
from fumehood.sandboxd.settings import Settings
from fumehood.sandboxd.supervisor import Supervisor

_NAME = "packages"
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
