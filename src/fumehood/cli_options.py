"""Options that several commands share; imports typer and the standard library."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Mode(StrEnum):
    NAMESPACES = "namespaces"
    POD = "pod"
    UNSAFE_DEGRADED = "unsafe-degraded"


class Limits(StrEnum):
    ENFORCED = "enforced"
    BEST_EFFORT = "best-effort"


ModeOption = Annotated[
    Mode,
    typer.Option(
        envvar="FUMEHOOD_MODE",
        help="Which walls: namespaces is the default; pod talks to a container that is the wall; unsafe-degraded "
        "has no namespaces and is for code that you trust.",
    ),
]
LimitsOption = Annotated[
    Limits,
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


def guest_socket_for(context: typer.Context, mode: Mode, guest_socket: Path | None) -> Path | None:
    """Mode pod needs one; one from the environment may be there for other calls than this one."""
    source = context.get_parameter_source("guest_socket")
    if mode is not Mode.POD and source is not None and source.name == "ENVIRONMENT":
        guest_socket = None
    if (mode is Mode.POD) != (guest_socket is not None):
        raise typer.BadParameter("--mode pod and --guest-socket go together", param_hint="--guest-socket")
    return guest_socket
