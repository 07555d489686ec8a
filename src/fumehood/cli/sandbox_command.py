"""`fumehood sandbox`: runs the sandbox server."""

import asyncio
import logging
import math
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from fumehood.cli import start_banner
from fumehood.cli.options import (
    DEFAULT_POOL,
    EXIT_UNAVAILABLE,
    METRICS_TOKEN_VARIABLE,
    TOKEN_VARIABLE,
    CommandFailed,
    GuestSocketOption,
    LimitsOption,
    ModeOption,
    QuietOption,
    SandboxConfigOption,
    exit_on_error,
    load_sandbox_settings,
    require_linux,
)

if TYPE_CHECKING:
    from fumehood.http_server.listening_sockets import ListenAddress, ListeningSocket
    from fumehood.sandbox_server.settings import SandboxServerSettings

EPILOG = """\b
The token is read from --token-file or from FUMEHOOD_SANDBOX_TOKEN, the metrics token from --metrics-token-file or from
FUMEHOOD_SANDBOX_METRICS_TOKEN. Other settings (network, packages, disks, limits) come from --config FILE and from
variables such as FUMEHOOD_SANDBOX_EGRESS; docs/sandbox-server.md lists them. Precedence: options, variables, the file.

\b
Exit codes:
  0    stopped by a signal
  2    invalid usage
  125  this host cannot isolate code, or the address is not available
"""
_MIN_TOKEN_LENGTH = 16


@exit_on_error()
def sandbox(
    context: typer.Context,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            show_default="127.0.0.1:8090, in mode pod 0.0.0.0:8080",
            help="The address to listen on; port 0 picks a free one. Addresses other than loopback need a token.",
        ),
    ] = None,
    socket: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Listen on this Unix socket instead, for this user only."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file with the token that clients must send."),
    ] = None,
    metrics_token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file with a token that only permits /metrics."),
    ] = None,
    config: SandboxConfigOption = None,
    mode: ModeOption = "namespaces",
    limits: LimitsOption = "enforced",
    guest_socket: GuestSocketOption = None,
    pool: Annotated[
        int, typer.Option(metavar="N", min=0, help="How many sandboxes are kept warm.")
    ] = DEFAULT_POOL,
    capacity: Annotated[int, typer.Option(metavar="N", min=1, help="The maximum number of sandboxes.")] = 256,
    tenant_sandboxes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The maximum number of sandboxes per tenant.")
    ] = None,
    tenant_memory: Annotated[
        int | None,
        typer.Option(metavar="BYTES", min=1, help="The maximum memory of all sandboxes of a tenant."),
    ] = None,
    idle_seconds: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Delete a sandbox after this idle time; 0 means never."),
    ] = 86_400.0,
    file_bytes: Annotated[
        int, typer.Option(metavar="BYTES", min=1, help="The maximum size of an uploaded file or archive.")
    ] = 4 << 30,
    preload: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated packages that are imported before a sandbox starts.",
        ),
    ] = "numpy,pandas,pyarrow,matplotlib",
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long running code may continue during shutdown.")
    ] = 10.0,
    exit_with_stdin: Annotated[
        bool,
        typer.Option(
            "--exit-with-stdin",
            help="Stop when standard input is closed, that is when the parent process has ended.",
        ),
    ] = False,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="The format of the log on standard error.")
    ] = "text",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="The minimum level of the log.")
    ] = "info",
    quiet: QuietOption = False,
) -> None:
    """Serve sandboxes over HTTP, with the protocol of docs/sandbox-protocol.md.

    SIGTERM or Ctrl-C shuts it down gracefully, a second one at once.
    """
    _check_seconds(idle_seconds, "--idle-seconds")
    _check_seconds(grace, "--grace")
    require_linux()
    from fumehood.sandbox_server import structured_logging

    options = {
        "preload": tuple(filter(None, preload.split(","))),
        "mode": mode,
        "limits": limits,
        "guest_socket": guest_socket,
        "pool": pool,
        "capacity": capacity,
        "tenant_sandboxes": tenant_sandboxes,
        "tenant_memory": tenant_memory,
        "idle_seconds": idle_seconds or None,
        "file_bytes": file_bytes,
    }
    settings = load_sandbox_settings(context, config, options)
    address = _parse_address(listen, socket, settings.mode)
    if settings.mode == "pod":
        _require_token_file(token_file)
    token = _load_token(token_file, "--token-file", TOKEN_VARIABLE)
    metrics_token = _load_token(metrics_token_file, "--metrics-token-file", METRICS_TOKEN_VARIABLE)
    _check_metrics_token(token, metrics_token)
    if token is None and not address.is_loopback:
        raise typer.BadParameter(
            f"{address.host} can be reached from other machines: put a token into a file and pass --token-file, or set "
            f"{TOKEN_VARIABLE}",
            param_hint="--listen",
        )
    structured_logging.configure_logging(log_format, getattr(logging, log_level.upper()))
    shows_banner = log_format == "text" and not quiet
    _run(settings, address, _Tokens(token, metrics_token), grace, exit_with_stdin, shows_banner)


def _check_seconds(value: float, option: str) -> None:
    if not 0 <= value < math.inf:
        raise typer.BadParameter("must be a number of seconds", param_hint=option)


def _parse_address(listen: str | None, socket: Path | None, mode: str) -> "ListenAddress":
    from fumehood.http_server.listening_sockets import ListenAddress

    if socket is not None:
        if listen is not None:
            raise typer.BadParameter("--listen and --socket exclude each other", param_hint="--socket")
        return ListenAddress(path=socket)
    try:
        return ListenAddress.parse(listen or ("0.0.0.0:8080" if mode == "pod" else "127.0.0.1:8090"))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--listen") from error


def _require_token_file(token_file: Path | None) -> None:
    """Pods share a cluster's network, and the environment of a container shows up in too many places."""
    if os.environ.get(TOKEN_VARIABLE) is not None:
        raise typer.BadParameter(
            "mode pod takes no token from the environment: mount the Secret as a file and pass --token-file",
            param_hint=TOKEN_VARIABLE,
        )
    if token_file is None:
        raise typer.BadParameter(
            "mode pod requires a token: mount a Secret as a file (defaultMode 0400 or, with fsGroup, 0440) and name it",
            param_hint="--token-file",
        )


class _Tokens(NamedTuple):
    token: str | None
    metrics_token: str | None


def _check_metrics_token(token: str | None, metrics_token: str | None) -> None:
    if metrics_token is None:
        return
    if token is None:
        raise typer.BadParameter(
            "requires --token-file: without it, everybody may read the metrics",
            param_hint="--metrics-token-file",
        )
    if token == metrics_token:
        raise typer.BadParameter("must differ from the token", param_hint="--metrics-token-file")


def _load_token(file: Path | None, option: str, variable: str) -> str | None:
    """Read a token from its file or variable; never from the command line, which every process can read."""
    if file is not None:
        hint = option
        token = _read_token_file(file, option)
    else:
        hint = variable
        value = os.environ.pop(variable, None)
        if value is None:
            return None
        token = value.strip()
    if len(token) < _MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise typer.BadParameter(
            f"a token needs at least {_MIN_TOKEN_LENGTH} printable characters and no spaces", param_hint=hint
        )
    return token


def _read_token_file(file: Path, option: str) -> str:
    from fumehood.http_server.secret_files import InsecureSecretFile, read_secret_file

    try:
        return read_secret_file(file).decode().strip()
    except InsecureSecretFile as error:
        reason = str(error)
    except OSError as error:
        reason = error.strerror or str(error)
    except UnicodeError:
        reason = "it is not text"
    raise typer.BadParameter(f"{file}: {reason}", param_hint=option)


def _stop_at_end_of_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _run(
    settings: "SandboxServerSettings",
    address: "ListenAddress",
    tokens: _Tokens,
    grace: float,
    exit_with_stdin: bool,
    shows_banner: bool,
) -> None:
    from fumehood.http_server.listening_sockets import ListenError, listen
    from fumehood.sandbox_server.host.linux_capabilities import limit_supervisor_capabilities
    from fumehood.sandbox_server.isolation_errors import IsolationUnavailable

    try:
        listener = listen(address)
    except ListenError as error:
        raise CommandFailed(str(error), EXIT_UNAVAILABLE) from error
    try:
        limit_supervisor_capabilities()  # after binding a port, which may need more, and before any thread starts
        if exit_with_stdin:
            threading.Thread(target=_stop_at_end_of_input, daemon=True).start()
        _serve(settings, listener, tokens, grace, shows_banner)
    except IsolationUnavailable as error:
        text = f"This host cannot isolate code, so the server does not start. {error.reason}\n{error.advice}"
        raise CommandFailed(text, EXIT_UNAVAILABLE) from error
    finally:
        listener.close()


def _serve(
    settings: "SandboxServerSettings",
    listener: "ListeningSocket",
    tokens: _Tokens,
    grace: float,
    shows_banner: bool,
) -> None:
    import uvloop

    from fumehood.sandbox_server.api.server import SandboxServer

    def ready() -> None:
        print(f"Serving sandboxes on {listener.url} (mode {settings.mode}).", flush=True)
        if shows_banner:
            has_token = tokens.token is not None
            start_banner.print_banner(
                start_banner.describe_sandbox_server(settings, listener.url, has_token=has_token)
            )

    async def serve() -> None:
        await SandboxServer(settings, listener, **tokens._asdict(), grace_seconds=grace).run(ready)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
