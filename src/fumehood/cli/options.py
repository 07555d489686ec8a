"""Options, exit codes and settings that several commands share."""

import os
import stat
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from fumehood.gateway_config import GatewayConfig, StorageLocation
    from fumehood.sandbox_server.settings import SandboxServerSettings

TOKEN_VARIABLE = "FUMEHOOD_SANDBOX_TOKEN"  # noqa: S105 - its name, not its value
METRICS_TOKEN_VARIABLE = "FUMEHOOD_SANDBOX_METRICS_TOKEN"  # noqa: S105 - its name, not its value
SANDBOX_LIMITS = "providers.code_interpreter.settings.sandbox_limits"  # the gateway's setting for --limits
DEFAULT_POOL = 4  # sandboxes that a sandbox server keeps warm
EXIT_INVALID_USAGE = 2
EXIT_UNAVAILABLE = 125  # exit code: the command cannot do its work on this host


# Copies of types in fumehood.protocol, which `--help` need not import.
IsolationModeChoice = Literal["namespaces", "pod", "unsafe-degraded"]
LimitsChoice = Literal["enforced", "best-effort"]
MemorySizeChoice = Literal["1g", "4g", "16g", "64g"]

ModeOption = Annotated[
    IsolationModeChoice,
    typer.Option(
        envvar="FUMEHOOD_MODE",
        help="How to isolate code: with namespaces; in a pod, whose container is the isolation; or unsafe-degraded, "
        "without namespaces, for trusted code only.",
    ),
]
LimitsOption = Annotated[
    LimitsChoice,
    typer.Option(
        envvar="FUMEHOOD_LIMITS",
        help="If cgroups cannot limit memory: enforced refuses to run code, best-effort runs it without the limit.",
    ),
]
GatewayConfigOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", envvar="FUMEHOOD_CONFIG", help="Settings, as YAML; see docs/gateway.md."),
]
QuietOption = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print only the address when the server is ready; the log stays."),
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        envvar="FUMEHOOD_DATA",
        show_default="fumehood in the user's data directory",
        help="The directory of the database and the files; overrides storage.directory, storage.url and storage.blobs.",
    ),
]
GuestSocketOption = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        envvar="FUMEHOOD_GUEST_SOCKET",
        help="With --mode pod: the socket of the container.",
    ),
]
SandboxConfigOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        envvar="FUMEHOOD_SANDBOX_CONFIG",
        help="Settings of the sandbox server, as YAML; see docs/sandbox-server.md.",
    ),
]


type ServerKind = Literal["gateway", "sandbox"]


class CommandFailed(Exception):
    """Ends the command with this exit code; its text is safe to print."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def exit_on_error() -> Generator[None]:
    """Print the text of CommandFailed to standard error and exit. For commands, as a decorator."""
    try:
        yield
    except CommandFailed as error:
        print(error, file=sys.stderr)
        raise typer.Exit(error.exit_code) from None


def require_linux() -> None:
    if sys.platform != "linux":
        raise CommandFailed("Sandboxes require Linux.", EXIT_UNAVAILABLE)


def load_gateway_config(
    file: Path | None,
    data: Path | None,
    overrides: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> "GatewayConfig":
    """Load the gateway's settings with these options; `data` is the directory of --data."""
    from fumehood.configuration import ConfigError
    from fumehood.gateway_config import load_config

    if data is not None:
        location = {"storage.directory": str(data), "storage.url": None, "storage.blobs": None}
        overrides = {**(overrides or {}), **location}
    try:
        return load_config(file, os.environ, overrides, defaults)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="the configuration") from error


def detect_server_kind(file: Path | None, default: ServerKind = "gateway") -> ServerKind:
    """Which server's settings the file has; `limits` is a section of one and a setting of the other.

    default: what to say of a file that does not show it.
    """
    if file is None:
        return default
    from fumehood.configuration import ConfigError, read_yaml_file
    from fumehood.gateway_config import GatewayConfig
    from fumehood.sandbox_server.settings_loader import SETTING_NAMES

    try:
        if not stat.S_ISREG(file.stat().st_mode):
            return default  # a pipe can be read only once
        content = read_yaml_file(file)[0]
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}", param_hint="FILE") from error
    except ConfigError:
        return default  # which reports it
    limits = content.pop("limits", None)
    sandbox = len(content.keys() & set(SETTING_NAMES)) + isinstance(limits, str)
    gateway = len(content.keys() & set(GatewayConfig.__struct_fields__)) + isinstance(limits, dict)
    if sandbox == gateway:
        return default
    return "sandbox" if sandbox > gateway else "gateway"


def locate_data(config: "GatewayConfig") -> "StorageLocation":
    """Where the gateway with these settings keeps its data."""
    from fumehood.configuration import ConfigError

    try:
        return config.storage.locate(os.environ)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="the configuration") from error


def find_unused_data(config: "GatewayConfig", location: "StorageLocation") -> str | None:
    """Data in the working directory that releases before the default data directory used, and this one does not."""
    here = Path.cwd()
    database, blobs = here / "fumehood.db", here / "blobs"
    if location.is_default and database.is_file() and database.resolve() != location.database.resolve():
        return (
            f"{database} is not used: the data is in {location.directory}. To use what is here, start with --data "
            f"{here}."
        )
    has_own_blobs = config.storage.url is not None and config.storage.blobs is None
    if has_own_blobs and (blobs / "owner").is_file() and blobs.resolve() != location.blobs.resolve():
        return f"{blobs} is not used: files are in {location.blobs}. To use what is here, set storage.blobs to it."
    return None


def load_sandbox_settings(
    context: typer.Context, file: Path | None, options: Mapping[str, Any]
) -> "SandboxServerSettings":
    """Merge settings. Precedence: command line, FUMEHOOD_SANDBOX_… variables, the file, the defaults in `options`."""
    from fumehood.configuration import ConfigError
    from fumehood.sandbox_server.settings_loader import load_sandbox_config

    options = {
        name: value.absolute() if isinstance(value, Path) else value for name, value in options.items()
    }
    given = {name: value for name, value in options.items() if is_on_command_line(context, name)}
    defaults = {name: value for name, value in options.items() if name not in given}
    try:
        settings = load_sandbox_config(file, os.environ, options=given, defaults=defaults).settings
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="the configuration") from error
    if settings.guest_socket == options["guest_socket"] or settings.mode != "pod":
        socket = resolve_guest_socket(context, settings.mode, settings.guest_socket)
        return replace(settings, guest_socket=socket)
    return settings


def is_on_command_line(context: typer.Context, name: str) -> bool:
    """Whether the option was given as an argument, not by a variable or as a default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def resolve_guest_socket(
    context: typer.Context, mode: IsolationModeChoice, guest_socket: Path | None
) -> Path | None:
    """Check that mode pod has a guest socket and other modes have none, ignoring one from the environment."""
    source = context.get_parameter_source("guest_socket")
    if mode != "pod" and source is not None and source.name == "ENVIRONMENT":
        guest_socket = None
    if (mode == "pod") != (guest_socket is not None):
        raise typer.BadParameter("--mode pod and --guest-socket go together", param_hint="--guest-socket")
    return guest_socket
