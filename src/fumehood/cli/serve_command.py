"""`fumehood serve`: runs the gateway."""

import asyncio
import gc
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from fumehood.cli import start_banner
from fumehood.cli.options import (
    EXIT_INVALID_USAGE,
    EXIT_UNAVAILABLE,
    SANDBOX_LIMITS,
    CommandFailed,
    DataOption,
    GatewayConfigOption,
    LimitsOption,
    QuietOption,
    exit_on_error,
    find_unused_data,
    is_on_command_line,
    load_gateway_config,
    locate_data,
)

if TYPE_CHECKING:
    from fumehood.gateway_config import GatewayConfig
    from fumehood.http_server.listening_sockets import ListeningSocket
    from fumehood.wiring import AssembledGateway

logger = logging.getLogger(__name__)

_MODEL_SERVER_SECONDS = 5.0  # how long the banner waits for the probe of the model servers
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
    context: typer.Context,
    config: GatewayConfigOption = None,
    data: DataOption = None,
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
    limits: LimitsOption = "enforced",
    allow_unauthenticated: Annotated[
        bool,
        typer.Option(
            "--allow-unauthenticated",
            help="With auth.required: false, serve other machines without API keys.",
        ),
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Serve the Responses API over any model server, with a code interpreter.

    SIGTERM or Ctrl-C shuts it down gracefully, a second one at once.
    """
    options = _Options(host, port, upstream, upstream_key_env, limits)
    settings = _load_config(context, config, data, options)
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
    if problem := find_unused_data(settings, locate_data(settings)):
        logger.warning("%s", problem)
    create_key = start_banner.keys_command(config, data)
    _run(settings, _Banner(settings, create_key, quiet=quiet))


class _Options(NamedTuple):
    host: str | None
    port: int | None
    upstream: str | None
    upstream_key_env: str | None
    limits: str


def _load_config(
    context: typer.Context, file: Path | None, data: Path | None, options: _Options
) -> "GatewayConfig":
    overrides: dict[str, object] = {}
    if options.host is not None:
        overrides["server.host"] = options.host
    if options.port is not None:
        overrides["server.port"] = options.port
    if options.upstream is not None:
        model = {"match": "*", "base_url": options.upstream}
        key = {} if options.upstream_key_env is None else {"api_key_env": options.upstream_key_env}
        overrides["models"] = [model | key]
    elif options.upstream_key_env is not None:
        raise typer.BadParameter("requires --upstream", param_hint="--upstream-key-env")
    if not is_on_command_line(context, "limits"):
        return load_gateway_config(file, data, overrides, defaults={SANDBOX_LIMITS: options.limits})
    settings = load_gateway_config(file, data, {**overrides, SANDBOX_LIMITS: options.limits})
    interpreter = settings.providers.code_interpreter.settings
    if interpreter.sandbox_url is not None or interpreter.claims_pods:
        where = "sandbox_url: that server" if interpreter.sandbox_url is not None else "pods: their template"
        raise typer.BadParameter(f"cannot be combined with {where} decides", param_hint="--limits")
    return settings


def _run(settings: "GatewayConfig", banner: "_Banner") -> None:
    from fumehood.gateway_config import ConfigError
    from fumehood.http_server.listening_sockets import ListenAddress, ListenError, listen
    from fumehood.protocol.openai.api_errors import StorageCorrupted, StorageUnavailable
    from fumehood.wiring import StartupError

    try:
        listener = listen(ListenAddress(settings.server.host, settings.server.port))
    except ListenError as error:
        raise CommandFailed(str(error), EXIT_UNAVAILABLE) from error
    try:
        _serve(settings, listener, banner)
    except ConfigError as error:
        raise CommandFailed(str(error), EXIT_INVALID_USAGE) from error
    except (StartupError, StorageCorrupted, StorageUnavailable) as error:
        raise CommandFailed(str(error), EXIT_UNAVAILABLE) from error
    finally:
        listener.close()


def _serve(settings: "GatewayConfig", listener: "ListeningSocket", banner: "_Banner") -> None:
    import uvloop

    from fumehood.wiring import AssembledGateway, serve

    def ready(gateway: AssembledGateway) -> None:
        # What lives as long as the process is not visited again, and the rest less often than by default: that saves
        # 5 % of the CPU of a burst and at least 9 % of that of 100 paced streams.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD, 20, 20)
        print(f"Serving the Responses API on {listener.url}/v1", flush=True)
        banner.start(gateway, listener.url)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, os.environ, listener.sock, ready))


class _Banner:
    """Says what the gateway serves: on standard error, or as an event of a JSON log.

    create_key: the command that creates a key.
    """

    def __init__(self, config: "GatewayConfig", create_key: str, *, quiet: bool) -> None:
        self._config = config
        self._create_key = create_key
        self._is_shown = config.telemetry.log_format == "text" and not quiet
        self._task: asyncio.Task[None] | None = None

    def start(self, gateway: "AssembledGateway", url: str) -> None:
        """Show it, as soon as the model servers have listed their models; nothing waits for that."""
        if self._is_shown:
            self._task = asyncio.ensure_future(self._print(gateway, url))
        else:
            logger.info("serving", extra={"fields": {"where": f"{url}/v1", **self._describe(gateway, None)}})

    async def _print(self, gateway: "AssembledGateway", url: str) -> None:
        from fumehood.protocol.name_sanitizing import sanitize_name

        degraded = await gateway.health.wait_until_checked(_MODEL_SERVER_SECONDS)
        listed = [sanitize_name(card.id) for card in await gateway.models.list_models()]
        request = start_banner.suggest_request(
            url,
            listed[0] if listed else None,
            runs_code=self._config.providers.code_interpreter.enabled,
            needs_key=not gateway.is_keyless,
        )
        rows = {**self._describe(gateway, listed), "try": request}
        if degraded:
            rows["warning"] = start_banner.describe_degraded([each.reason for each in degraded])
        start_banner.print_banner(rows)

    def _describe(self, gateway: "AssembledGateway", listed: list[str] | None) -> dict[str, str]:
        interpreter = self._config.providers.code_interpreter
        return {
            "models": start_banner.describe_models(self._config, listed),
            "data": start_banner.describe_data(gateway.location),
            "keys": start_banner.describe_keys(
                gateway.key_count,
                is_keyless=gateway.is_keyless,
                is_loopback=self._config.server.is_loopback,
                create=self._create_key,
            ),
            "sandboxes": start_banner.describe_sandboxes(interpreter.settings, enabled=interpreter.enabled),
        }
