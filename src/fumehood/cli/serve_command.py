"""`fumehood serve`: runs the gateway."""

import asyncio
import gc
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fumehood.cli.options import EXIT_INVALID_USAGE, EXIT_UNAVAILABLE, CommandFailed, exit_on_error

if TYPE_CHECKING:
    from fumehood.gateway_config import GatewayConfig
    from fumehood.http_server.listening_sockets import ListeningSocket

_GC_THRESHOLD = 20_000  # allocations before a collection of the youngest generation

EPILOG = """\b
Settings come from --config FILE and from variables such as FUMEHOOD_SERVER__PORT. Precedence: options, variables, the
file. config.example.yaml lists all settings. API keys are not settings: set the names of the variables that hold them.

\b
Exit codes:
  0    stopped by a signal
  2    invalid usage or configuration
  125  this host cannot isolate code, or the address is not available
"""


@exit_on_error()
def serve(
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", envvar="FUMEHOOD_CONFIG", help="Settings, as YAML; see docs/gateway.md."
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="HOST", show_default="127.0.0.1", help="The address to listen on.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=0,
            max=65535,
            show_default="8080",
            help="The port to listen on; 0 picks a free one.",
        ),
    ] = None,
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Use this server for every model, e.g. http://127.0.0.1:8000/v1; it must have /chat/completions.",
        ),
    ] = None,
    upstream_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The environment variable with the API key of --upstream."),
    ] = None,
    allow_unauthenticated: Annotated[
        bool,
        typer.Option(
            "--allow-unauthenticated",
            help="With auth.required: false, serve other machines without API keys.",
        ),
    ] = False,
) -> None:
    """Serve the Responses API over any model server, with a code interpreter.

    SIGTERM or Ctrl-C shuts it down gracefully, a second one at once.
    """
    settings = _load_config(config, host, port, upstream, upstream_key_env)
    if not (settings.server.is_loopback or settings.auth.required or allow_unauthenticated):
        raise typer.BadParameter(
            f"{settings.server.host} can be reached from other machines and auth.required is false: listen on "
            "127.0.0.1, or use --allow-unauthenticated to serve everybody",
            param_hint="--host",
        )
    from fumehood.sandbox_server import structured_logging

    structured_logging.configure_logging(
        settings.telemetry.log_format, logging.getLevelNamesMapping()[settings.telemetry.log_level.upper()]
    )
    _run(settings)


def _load_config(
    file: Path | None, host: str | None, port: int | None, upstream: str | None, key_variable: str | None
) -> "GatewayConfig":
    from fumehood.gateway_config import ConfigError, load_config

    overrides: dict[str, object] = {}
    if host is not None:
        overrides["server.host"] = host
    if port is not None:
        overrides["server.port"] = port
    if upstream is not None:
        model = {"match": "*", "base_url": upstream}
        overrides["models"] = [model if key_variable is None else {**model, "api_key_env": key_variable}]
    elif key_variable is not None:
        raise typer.BadParameter("requires --upstream", param_hint="--upstream-key-env")
    try:
        return load_config(file, os.environ, overrides)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="the configuration") from error


def _run(settings: "GatewayConfig") -> None:
    from fumehood.gateway_config import ConfigError
    from fumehood.http_server.listening_sockets import ListenAddress, ListenError, listen
    from fumehood.protocol.openai.api_errors import StorageCorrupted, StorageUnavailable
    from fumehood.wiring import StartupError

    try:
        listener = listen(ListenAddress(settings.server.host, settings.server.port))
    except ListenError as error:
        raise CommandFailed(str(error), EXIT_UNAVAILABLE) from error
    try:
        _serve(settings, listener)
    except ConfigError as error:
        raise CommandFailed(str(error), EXIT_INVALID_USAGE) from error
    except (StartupError, StorageCorrupted, StorageUnavailable) as error:
        raise CommandFailed(str(error), EXIT_UNAVAILABLE) from error
    finally:
        listener.close()


def _serve(settings: "GatewayConfig", listener: "ListeningSocket") -> None:
    import uvloop

    from fumehood.wiring import AssembledGateway, serve

    def ready(gateway: AssembledGateway) -> None:
        # What lives as long as the process is not visited again, and the rest less often than by default: that saves
        # 5 % of the CPU of a burst and at least 9 % of that of 100 paced streams.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD, 20, 20)
        print(
            _format_welcome(listener.url, is_direct=not settings.models, needs_key=not gateway.is_keyless),
            flush=True,
        )

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, os.environ, listener.sock, ready))


def _format_welcome(url: str, *, is_direct: bool, needs_key: bool) -> str:
    lines = [f"Serving the Responses API on {url}/v1", "", "Try it:"]
    key = ' -H "authorization: Bearer $OPENAI_API_KEY"' if needs_key else ""
    if is_direct:
        lines += [
            f"  curl {url}/v1/responses{key} -H 'content-type: application/json' -d '",
            '    {"model": "direct", "tools": [{"type": "code_interpreter"}], "stream": true,',
            '     "input": "```python\\nprint(6 * 7)\\n```"}\'',
            "",
            "No model is configured: `direct` runs the code it is sent. Set a model server with --upstream URL.",
        ]
    else:
        lines += [
            f"  curl {url}/v1/models{key}",
            f"  OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={'fh-…' if needs_key else 'none'} python your_program.py",
        ]
    return "\n".join(lines)
