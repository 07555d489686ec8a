"""What several commands share: options, an exit code, and settings."""

import os
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fumehood.sandbox_server.settings import Settings

TOKEN_VARIABLE = "FUMEHOOD_SANDBOX_TOKEN"  # noqa: S105 - its name, not its value
METRICS_TOKEN_VARIABLE = "FUMEHOOD_SANDBOX_METRICS_TOKEN"  # noqa: S105 - its name, not its value
EXIT_UNAVAILABLE = 125  # the exit code where what was asked for cannot be had here


class IsolationModeChoice(StrEnum):
    NAMESPACES = "namespaces"
    POD = "pod"
    UNSAFE_DEGRADED = "unsafe-degraded"


class LimitEnforcementChoice(StrEnum):
    ENFORCED = "enforced"
    BEST_EFFORT = "best-effort"


class MemorySizeChoice(StrEnum):
    GIB_1 = "1g"
    GIB_4 = "4g"
    GIB_16 = "16g"
    GIB_64 = "64g"


ModeOption = Annotated[
    IsolationModeChoice,
    typer.Option(
        envvar="FUMEHOOD_MODE",
        help="Which walls: namespaces is the default; pod talks to a container that is the wall; unsafe-degraded "
        "has no namespaces and is for code that you trust.",
    ),
]
LimitsOption = Annotated[
    LimitEnforcementChoice,
    typer.Option(
        envvar="FUMEHOOD_LIMITS",
        help="enforced refuses to run where memory cannot be bounded by cgroups; best-effort runs without that "
        "bound.",
    ),
]
GuestSocketOption = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        envvar="FUMEHOOD_GUEST_SOCKET",
        help="With --mode pod: the socket on which the container listens.",
    ),
]
SandboxConfigOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        envvar="FUMEHOOD_SANDBOX_CONFIG",
        help="Settings of the server, as TOML; see docs/sandbox-server.md.",
    ),
]


def require_linux() -> None:
    if sys.platform != "linux":
        print("Sandboxes need Linux.", file=sys.stderr)
        raise typer.Exit(EXIT_UNAVAILABLE)


def load_sandbox_settings(
    context: typer.Context, file: Path | None, options: Mapping[str, Any]
) -> "Settings":
    """Options of the command line come first, then FUMEHOOD_SANDBOX_… variables, the file, and what `options` holds."""
    from fumehood.sandbox_server.settings import Settings
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
    if "guest_socket" not in values or merged["mode"] != IsolationModeChoice.POD:
        merged["guest_socket"] = resolve_guest_socket(
            context, IsolationModeChoice(merged["mode"]), merged["guest_socket"]
        )
    return Settings(**merged)


def resolve_guest_socket(
    context: typer.Context, mode: IsolationModeChoice, guest_socket: Path | None
) -> Path | None:
    """Mode pod needs one; one from the environment may be there for other calls than this one."""
    source = context.get_parameter_source("guest_socket")
    if mode is not IsolationModeChoice.POD and source is not None and source.name == "ENVIRONMENT":
        guest_socket = None
    if (mode is IsolationModeChoice.POD) != (guest_socket is not None):
        raise typer.BadParameter("--mode pod and --guest-socket go together", param_hint="--guest-socket")
    return guest_socket
