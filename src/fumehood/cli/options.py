"""Options, exit codes and settings that several commands share."""

import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from fumehood.sandbox_server.settings import SandboxServerSettings

TOKEN_VARIABLE = "FUMEHOOD_SANDBOX_TOKEN"  # noqa: S105 - its name, not its value
METRICS_TOKEN_VARIABLE = "FUMEHOOD_SANDBOX_METRICS_TOKEN"  # noqa: S105 - its name, not its value
EXIT_INVALID_USAGE = 2
EXIT_UNAVAILABLE = 125  # exit code: the command cannot do its work on this host


# Copies of types in fumehood.protocol, which `--help` need not import.
IsolationModeChoice = Literal["namespaces", "pod", "unsafe-degraded"]
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
    Literal["enforced", "best-effort"],
    typer.Option(
        envvar="FUMEHOOD_LIMITS",
        help="If cgroups cannot limit memory: enforced refuses to run code, best-effort runs it without the limit.",
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
        help="Settings of the sandbox server, as TOML; see docs/sandbox-server.md.",
    ),
]


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


def load_sandbox_settings(
    context: typer.Context, file: Path | None, options: Mapping[str, Any]
) -> "SandboxServerSettings":
    """Merge settings. Precedence: command line, FUMEHOOD_SANDBOX_… variables, the file, the defaults in `options`."""
    from fumehood.sandbox_server.settings import SandboxServerSettings
    from fumehood.sandbox_server.settings_loader import InvalidSetting, load_setting_values

    try:
        values = load_setting_values(file, os.environ)
    except InvalidSetting as error:
        raise typer.BadParameter(str(error), param_hint="the configuration") from error
    for name in options:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            values.pop(name, None)
    merged = {**options, **values}
    if "guest_socket" not in values or merged["mode"] != "pod":
        merged["guest_socket"] = resolve_guest_socket(context, merged["mode"], merged["guest_socket"])
    return SandboxServerSettings(**merged)


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
