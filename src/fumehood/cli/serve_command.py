"""`fumehood serve`: the gateway from the command line."""

import asyncio
import gc
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fumehood.cli.options import EXIT_UNAVAILABLE

if TYPE_CHECKING:
    from fumehood.config import GatewayConfig
    from fumehood.http_server.listening_sockets import ListeningSocket

_GC_THRESHOLD = 20_000  # how many more may be there before they are looked through
EPILOG = """\b
Settings come from --config FILE, and one by one from variables such as FUMEHOOD_SERVER__PORT; options come first, then
variables, then the file. config.example.yaml has all of them. Keys are never settings: name the variables that hold
them.

\b
Exit codes:
  0    it was stopped
  2    this command was used wrongly, or the configuration cannot be served
  125  code cannot be isolated here, or nobody can be served at that place
"""


def serve(
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", envvar="FUMEHOOD_CONFIG", help="Settings, as YAML; see docs/gateway.md."
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="HOST", show_default="127.0.0.1", help="Where to listen.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=0,
            max=65535,
            show_default="8080",
            help="Where to listen; 0 takes any free port.",
        ),
    ] = None,
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask this server for every model, e.g. http://127.0.0.1:8000/v1: any that has /chat/completions.",
        ),
    ] = None,
    upstream_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The variable that holds the key of --upstream."),
    ] = None,
    allow_unauthenticated: Annotated[
        bool,
        typer.Option(
            "--allow-unauthenticated",
            help="With auth.required: false in the settings, let other machines in without keys.",
        ),
    ] = False,
) -> None:
    """Serve the Responses API: any model behind it, with a code interpreter of its own.

    SIGTERM or Ctrl-C stops it in good order, a second one at once.
    """
    settings = _load_config(config, host, port, upstream, upstream_key_env)
    if not (settings.server.is_loopback or settings.auth.required or allow_unauthenticated):
        raise typer.BadParameter(
            f"{settings.server.host} can be reached from other machines and auth.required is false: listen on "
            "127.0.0.1, or give --allow-unauthenticated to let everybody in",
            param_hint="--host",
        )
    from fumehood.sandbox_server import structured_logging

    structured_logging.configure_logging(
        settings.telemetry.log_format, logging.getLevelNamesMapping()[settings.telemetry.log_level.upper()]
    )
    raise typer.Exit(_run(settings))


def _load_config(
    file: Path | None, host: str | None, port: int | None, upstream: str | None, key_variable: str | None
) -> "GatewayConfig":
    from fumehood.config import ConfigError, load_config

    given: dict[str, object] = {}
    if host is not None:
        given["server.host"] = host
    if port is not None:
        given["server.port"] = port
    if upstream is not None:
        model = {"match": "*", "base_url": upstream}
        given["models"] = [model if key_variable is None else {**model, "api_key_env": key_variable}]
    elif key_variable is not None:
        raise typer.BadParameter("it goes with --upstream", param_hint="--upstream-key-env")
    try:
        return load_config(file, os.environ, given)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="the configuration") from error


def _run(settings: "GatewayConfig") -> int:
    from fumehood.config import ConfigError
    from fumehood.http_server.listening_sockets import ListenAddress, ListenError, listen
    from fumehood.protocol.openai.api_errors import StorageCorrupted, StorageUnavailable
    from fumehood.wiring import StartupError

    try:
        listener = listen(ListenAddress(settings.server.host, settings.server.port))
    except ListenError as error:
        print(error, file=sys.stderr)
        return EXIT_UNAVAILABLE
    try:
        _serve(settings, listener)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (StartupError, StorageCorrupted, StorageUnavailable) as error:
        print(error, file=sys.stderr)
        return EXIT_UNAVAILABLE
    finally:
        listener.close()
    return 0


def _serve(settings: "GatewayConfig", listener: "ListeningSocket") -> None:
    import uvloop

    from fumehood.wiring import AssembledGateway, serve

    def ready(parts: AssembledGateway) -> None:
        _tune_garbage_collector()
        print(
            _format_welcome(listener.url, is_direct=not settings.models, needs_key=not parts.is_keyless),
            flush=True,
        )

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, os.environ, listener.sock, ready))


def _tune_garbage_collector() -> None:
    """What is there when serving begins will stay, and a request leaves next to no cycles behind: looking for them as
    often as Python does takes a twentieth of all time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 20)


def _format_welcome(where: str, *, is_direct: bool, needs_key: bool) -> str:
    lines = [f"Serving the Responses API on {where}/v1", "", "Try it:"]
    key = ' -H "authorization: Bearer $OPENAI_API_KEY"' if needs_key else ""
    if is_direct:
        lines += [
            f"  curl {where}/v1/responses{key} -H 'content-type: application/json' -d '",
            '    {"model": "direct", "tools": [{"type": "code_interpreter"}], "stream": true,',
            '     "input": "```python\\nprint(6 * 7)\\n```"}\'',
            "",
            "No model is configured: `direct` runs the code that it is sent. Name a model server with --upstream URL.",
        ]
    else:
        lines += [
            f"  curl {where}/v1/models{key}",
            f"  OPENAI_BASE_URL={where}/v1 OPENAI_API_KEY={'fh-…' if needs_key else 'none'} python your_program.py",
        ]
    return "\n".join(lines)
