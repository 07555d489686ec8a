"""Assembles a gateway from its configuration, serves it, and closes it."""

import asyncio
import contextlib
import importlib
import logging
import socket
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fumehood.containers import ContainerFileLimits, ContainerSettings, SandboxContainerService
from fumehood.engine import EngineRunService, LoopLimits, ReaderLagLimits
from fumehood.files import UploadFileService
from fumehood.files.input_file_loader import InputFileLoader
from fumehood.files.url_fetcher import PassthroughUrlChecker, UrlFetcher, UrlFetchError
from fumehood.gateway import (
    ANY_ORIGIN,
    AnonymousAuthenticator,
    ApiKeyAuthenticator,
    Authenticator,
    BufferedRequestLog,
    CorsPolicy,
    EventLoopLagMonitor,
    Gateway,
    GatewayMetrics,
    GatewayWebServer,
    RequestLimiter,
    RequestLog,
    log_to_logger,
    reject_every_url,
)
from fumehood.gateway_config import (
    ConfigError,
    GatewayConfig,
    StorageLocation,
    resolve_secret,
)
from fumehood.gateway_stats import GatewayStats
from fumehood.http_server.asgi_exchange import Application
from fumehood.interfaces import (
    ApiKeyStore,
    Clock,
    ContainerService,
    FileService,
    HostedTool,
    ModelProvider,
    RunService,
    SandboxProvider,
)
from fumehood.models.registry import ModelRegistry, open_model_registry
from fumehood.models.upstream_health import UpstreamHealth
from fumehood.protocol.api_keys import ApiKeyLimits
from fumehood.protocol.file_types import UploadFileTypes
from fumehood.protocol.openai.response_projection import INCLUDE_CODE_OUTPUTS
from fumehood.protocol.sandbox.sandbox_errors import SandboxError
from fumehood.protocol.sandbox.sandbox_messages import MemoryTier
from fumehood.sandbox_client import LocalServerProvider, RemoteSandboxProvider, SandboxReadiness
from fumehood.sandbox_wiring import StartupError, get_memory_tiers, has_local_sandboxes, open_sandboxes
from fumehood.store import DiskBlobStore, GarbageCollectedBlobs, SqliteStore, StoreOpenError
from fumehood.store.aes_gcm_sealer import (
    AesGcmSealer,
    InvalidSealingKeys,
    load_or_create_keys,
    parse_keys,
    read_keys_file,
)
from fumehood.tools import (
    CodeInterpreterTool,
    CodeInterpreterToolSettings,
    InlineLimits,
    OutputLimits,
    ShellTool,
    ShellToolSettings,
)

if TYPE_CHECKING:
    from fumehood.telemetry import OtlpPipeline

CODE_INTERPRETER = "code_interpreter"
_OTEL_SIGNALS = ("TRACES", "METRICS", "LOGS")
_OTLP_ENDPOINT_VARIABLES = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    *(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT" for signal in _OTEL_SIGNALS),
)

logger = logging.getLogger(__name__)


class SystemClock:
    """A `Clock` with the time of this machine."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(frozen=True, slots=True)
class AssembledGateway:
    """A gateway that is ready to be served.

    is_keyless: whether it accepts requests without a key.
    key_count: the number of valid keys; None if no key is ever required.
    health: knows which model servers cannot serve.
    """

    app: Application
    runs: RunService
    models: ModelProvider
    metrics: GatewayMetrics
    location: StorageLocation
    is_keyless: bool
    key_count: int | None
    health: UpstreamHealth


async def serve(
    config: GatewayConfig,
    environ: Mapping[str, str],
    sock: socket.socket,
    on_ready: Callable[[AssembledGateway], None],
) -> None:
    """Serve until a signal arrives. Raises ConfigError, StartupError."""
    request_log = BufferedRequestLog(_write_to_stderr, config.telemetry.log_format)
    async with assemble_gateway(config, environ, request_log) as gateway:
        server = GatewayWebServer(
            gateway.app,
            sock,
            lambda: gateway.runs.drain(config.server.shutdown_grace),
            on_stalled=gateway.metrics.record_stalled_reader,
        )
        await server.run(lambda: on_ready(gateway))
    request_log.flush()


def _write_to_stderr(lines: str) -> None:
    with contextlib.suppress(OSError):  # the reader of the pipe is gone
        sys.stderr.write(lines)
        sys.stderr.flush()


@asynccontextmanager
async def assemble_gateway(
    config: GatewayConfig, environ: Mapping[str, str], request_log: RequestLog = log_to_logger
) -> AsyncGenerator[AssembledGateway]:
    """Open everything that the configuration asks for, and close it in reverse order when the block is left.

    Raises ConfigError, StartupError.
    """
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        stats = GatewayStats()
        location = config.storage.locate(environ)
        store = await _open_store(location, stats, stack)
        authenticator = await _open_authentication(config, store, clock, stack)
        is_keyless = not isinstance(authenticator, ApiKeyAuthenticator) or authenticator.allows_anonymous
        _check_cors_origins(config, is_keyless)
        blobs = await _open_blobs(location.blobs, config.storage.min_free_bytes, store, clock, stack)
        files = await stack.enter_async_context(UploadFileService(store, blobs, clock, config.files))
        models = _open_models(config, clock, environ, stats, stack)
        health = await stack.enter_async_context(models.open_health())
        telemetry = open_telemetry(config, environ, stats, stack)
        interpreter = config.providers.code_interpreter
        sandboxes = await open_sandboxes(config, environ, stack, await store.get_database_id(), stats.claims)
        metrics = _build_metrics(config, location, stats, sandboxes)
        stack.enter_context(EventLoopLagMonitor(metrics.loop_lag))
        sealer = _build_sealer(config, location, environ)
        containers = await stack.enter_async_context(
            SandboxContainerService(
                sandboxes,
                store,
                blobs,
                clock,
                _build_container_settings(config, get_memory_tiers(sandboxes)),
                sealer=sealer,
                uploads=files,
                stats=stats.containers,
            )
        )
        tools = _build_tools(config, containers, files, clock)
        metrics.hosted_item_types = frozenset().union(*(tool.item_types for tool in tools))
        runs: RunService = EngineRunService(
            models if telemetry is None else telemetry.instrument_models(models),
            tools if telemetry is None else telemetry.instrument_tools(tools),
            store,
            clock,
            limits=LoopLimits(
                turns=config.limits.turns,
                seconds=config.limits.response_seconds,
                characters=config.limits.max_turn_characters,
            ),
            lag_limits=ReaderLagLimits(
                events=config.limits.max_reader_lag_events, seconds=config.limits.max_reader_lag_seconds
            ),
            disabled_tools=frozenset() if interpreter.enabled else frozenset({CODE_INTERPRETER}),
            sealer=sealer,
            attachments=_build_input_file_loader(config, files, stack),
            stats=stats,
        )
        if telemetry is not None:
            runs = telemetry.instrument_runs(runs)
        gateway = Gateway(
            runs=runs,
            store=store,
            models=models,
            passthrough=models,
            containers=containers,
            files=files,
            max_file_bytes=config.files.file_bytes,
            accepted_types=UploadFileTypes(config.files.extra_types),
            authenticator=authenticator,
            cors=CorsPolicy(config.server.cors_origins),
            metrics=metrics,
            request_log=request_log,
            limits=_build_limits(config, clock),
            always_include=(INCLUDE_CODE_OUTPUTS,) if interpreter.settings.always_include_outputs else (),
            min_bytes_per_second=config.limits.min_body_bytes_per_second,
            serve_metrics=config.telemetry.metrics,
            pass_fields={name for model in config.models for name in model.pass_fields},
            hosted_tools=_list_hosted_types(config, tools),
            find_url_problem=_build_url_policy(config),
            max_passthrough_seconds=config.limits.response_seconds,
            readiness_problem=SandboxReadiness(sandboxes, clock) if interpreter.enabled else None,
            find_degraded=health.find_degraded,
        )
        app = gateway
        if telemetry is not None:
            app = telemetry.wrap_application(gateway)
            telemetry.export_metrics_page(_read_all_metrics(metrics, sandboxes, interpreter.enabled))
            # Read for the last time while the sandbox server still answers.
            stack.push_async_callback(telemetry.close_metrics_page)
        key_count = authenticator.key_count if isinstance(authenticator, ApiKeyAuthenticator) else None
        yield AssembledGateway(app, runs, models, metrics, location, is_keyless, key_count, health)


def _check_cors_origins(config: GatewayConfig, is_keyless: bool) -> None:
    """Raises ConfigError."""
    if is_keyless and ANY_ORIGIN in config.server.cors_origins:
        raise ConfigError(
            "server.cors_origins: without keys, * would let every web page run code here: name the origins, or "
            "create a key with `fumehood keys create`."
        )


def _open_models(
    config: GatewayConfig,
    clock: Clock,
    environ: Mapping[str, str],
    stats: GatewayStats,
    stack: AsyncExitStack,
) -> ModelRegistry:
    """Raises ConfigError."""
    try:
        models = open_model_registry(config.models, clock, environ, stats.models)
    except ValueError as error:
        raise ConfigError(f"models: {error}.") from None
    stack.push_async_callback(models.close)
    return models


def _build_limits(config: GatewayConfig, clock: Clock) -> RequestLimiter:
    limits = config.limits
    defaults = ApiKeyLimits(
        requests_per_minute=limits.requests_per_minute,
        concurrent=limits.concurrent,
        body_bytes=limits.body_bytes,
    )
    return RequestLimiter(
        defaults,
        max_concurrent=limits.concurrent_total,
        max_memory_bytes=limits.body_bytes_total,
        monotonic=clock.monotonic,
    )


def _build_sealer(
    config: GatewayConfig, location: StorageLocation, environ: Mapping[str, str]
) -> AesGcmSealer:
    """Raises ConfigError."""
    settings = config.compaction
    default_file = location.database.with_name(location.database.name + ".keys")
    source = settings.keys_env or settings.keys_file or str(default_file)
    try:
        if settings.keys_env is not None:
            keys = parse_keys(resolve_secret(environ, settings.keys_env, "compaction.keys_env") or "")
        else:
            keys = (
                load_or_create_keys(default_file)
                if settings.keys_file is None
                else read_keys_file(Path(settings.keys_file))
            )
        return AesGcmSealer(keys)
    except InvalidSealingKeys as error:
        raise ConfigError(f"compaction: {source}: {error}.") from None


def open_telemetry(
    config: GatewayConfig, environ: Mapping[str, str], stats: GatewayStats, stack: AsyncExitStack
) -> "OtlpPipeline | None":
    """Open the OTLP pipeline; None, without importing OpenTelemetry, if no endpoint is set. Raises ConfigError."""
    endpoint = config.telemetry.otlp
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if not endpoint and not any(environ.get(variable) for variable in _OTLP_ENDPOINT_VARIABLES):
        return None
    _check_otel_variables(environ)
    try:
        from fumehood.telemetry import OtlpPipeline, OtlpPipelineSettings
    except ModuleNotFoundError as error:
        raise ConfigError("telemetry.otlp: it needs an extra: pip install 'fumehood[otel]'.") from error
    settings = OtlpPipelineSettings(
        endpoint=endpoint,
        profile=config.telemetry.profile,
        content_bytes=config.telemetry.content_bytes,
        redact=load_redactor(config.telemetry.redact),
        provider_name=config.telemetry.provider_name,
        models=[model.match for model in config.models if not model.is_pattern],
    )
    pipeline = OtlpPipeline(settings, environ, stats)
    stack.push_async_callback(pipeline.close)
    return pipeline


def load_redactor(target: str | None) -> Callable[[str], str] | None:
    """Import the operator's redaction function, MODULE:FUNCTION. Raises ConfigError."""
    if target is None:
        return None
    module, _, name = target.partition(":")
    try:
        function: object = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"telemetry.redact: {target} cannot be found: {error}.") from error
    if not callable(function):
        raise ConfigError(f"telemetry.redact: {target} is no function.")

    def redact(text: str) -> str:
        redacted = function(text)
        if not isinstance(redacted, str):
            raise TypeError(f"{target} did not return a string")
        return redacted

    return redact


def _check_otel_variables(environ: Mapping[str, str]) -> None:
    """Reject protocols and exporters that are not supported, instead of sending nothing. Raises ConfigError."""
    for variable in _OTLP_ENDPOINT_VARIABLES:
        url = environ.get(variable, "").strip().lower()
        if url and not url.startswith(("http://", "https://")):
            raise ConfigError(f"{variable}: write a URL such as http://HOST:4318.")
    for signal in _OTEL_SIGNALS:
        variable = f"OTEL_{signal}_EXPORTER"
        if environ.get(variable, "otlp").strip().lower() not in ("", "otlp", "none"):
            raise ConfigError(f"{variable}: only otlp and none are supported.")
    for infix in ("", *(f"{signal}_" for signal in _OTEL_SIGNALS)):
        variable = f"OTEL_EXPORTER_OTLP_{infix}PROTOCOL"
        if environ.get(variable, "http/protobuf").strip().lower() not in ("", "http/protobuf"):
            raise ConfigError(f"{variable}: only http/protobuf is supported.")


def _build_metrics(
    config: GatewayConfig, location: StorageLocation, stats: GatewayStats, sandboxes: SandboxProvider
) -> GatewayMetrics:
    """A remote sandbox server serves its own metrics; those of the embedded one are included."""
    embedded = sandboxes if isinstance(sandboxes, LocalServerProvider) else None
    if not config.providers.code_interpreter.enabled:
        embedded = None
    return GatewayMetrics(
        stats,
        disk_paths={"database": location.database.parent, "blobs": location.blobs},
        fetch_sandbox_metrics=None if embedded is None else embedded.metrics,
    )


def _read_all_metrics(
    metrics: GatewayMetrics, sandboxes: SandboxProvider, has_sandboxes: bool
) -> Callable[[], Awaitable[bytes]]:
    """The gateway's page, with that of a remote sandbox server, which it does not include."""

    async def read_page() -> bytes:
        page = await metrics.render()
        if has_sandboxes and isinstance(sandboxes, RemoteSandboxProvider):
            with contextlib.suppress(SandboxError):
                page += await sandboxes.metrics()
        return page

    return read_page


async def _open_store(location: StorageLocation, stats: GatewayStats, stack: AsyncExitStack) -> SqliteStore:
    try:
        store = await SqliteStore.open(location.database, stats=stats.store)
    except StoreOpenError as error:
        advice = ". Choose another directory with --data DIR." if isinstance(error.__cause__, OSError) else ""
        raise StartupError(f"{error}{advice}") from error
    stack.push_async_callback(store.close)
    if orphaned := await store.fail_orphaned_responses():
        logger.warning("responses_lost", extra={"fields": {"number": orphaned}})
    return store


async def _open_blobs(
    directory: Path, min_free_bytes: int, store: SqliteStore, clock: Clock, stack: AsyncExitStack
) -> GarbageCollectedBlobs:
    try:
        disk = DiskBlobStore(directory, await store.get_database_id(), min_free_bytes)
    except StoreOpenError as error:
        raise StartupError(str(error)) from error
    except OSError as error:
        raise StartupError(f"storage.blobs: {directory} cannot be used: {error.strerror}.") from error
    return await stack.enter_async_context(GarbageCollectedBlobs(disk, store).run_garbage_collector(clock))


async def _open_authentication(
    config: GatewayConfig, store: ApiKeyStore, clock: Clock, stack: AsyncExitStack
) -> Authenticator:
    """Open authentication by key, or anonymous access if the settings allow it. Raises ConfigError."""
    anonymous = AnonymousAuthenticator(config.server.allowed_hosts)
    if not config.auth.required:
        return anonymous
    keys = await stack.enter_async_context(ApiKeyAuthenticator(store, clock, anonymous))
    if not keys.key_count and not config.server.is_loopback:
        raise ConfigError(
            f"server.host: {config.server.host} can be reached from other machines and there are no keys: create one "
            "with `fumehood keys create`, or listen on 127.0.0.1."
        )
    if not keys.key_count and not keys.allows_anonymous:
        logger.warning("all keys are revoked: requests are rejected until `fumehood keys create` creates one")
    return keys


def _build_container_settings(
    config: GatewayConfig, memory_tiers: tuple[MemoryTier, ...] | None
) -> ContainerSettings:
    """memory_tiers: those that there are pools for; None if one server makes sandboxes of any."""
    settings = config.providers.code_interpreter.settings
    return ContainerSettings(
        isolation=settings.isolation,
        claim_timeout=settings.claim_timeout,
        containers_per_tenant=config.limits.containers_per_tenant,
        allowed_domains=frozenset(settings.allowed_domains),
        idle_minutes=settings.idle_minutes,
        max_idle_minutes=settings.max_idle_minutes,
        max_lifetime_hours=settings.max_lifetime_hours,
        retention_hours=settings.retention_hours,
        retained_bytes=settings.retained_bytes,
        file_limits=ContainerFileLimits(
            file_bytes=settings.file_bytes,
            container_bytes=settings.container_bytes,
            files=settings.container_files,
        ),
        concurrent_uploads=config.files.concurrent_uploads,
        sandboxes_survive_restart=not has_local_sandboxes(config),
        memory_tiers=memory_tiers,
    )


def _build_input_file_loader(
    config: GatewayConfig, files: FileService, stack: AsyncExitStack
) -> InputFileLoader:
    """Build the loader of input files; it fetches or passes on URLs only if the operator allows it."""
    settings = config.inputs
    url_handler: UrlFetcher | PassthroughUrlChecker | None = None
    if settings.fetch_urls:
        url_handler = UrlFetcher(settings)
        stack.callback(url_handler.close)
    elif settings.pass_urls:
        url_handler = PassthroughUrlChecker(settings)
    return InputFileLoader(files, url_handler, settings)


def _build_url_policy(config: GatewayConfig) -> Callable[[str], str | None]:
    """Which URLs requests that are passed through may contain."""
    if not config.inputs.pass_urls:
        return reject_every_url
    policy = PassthroughUrlChecker(config.inputs)

    def find_problem(url: str) -> str | None:
        try:
            policy.check(url)
        except UrlFetchError as error:
            return str(error)
        return None

    return find_problem


def _build_tools(
    config: GatewayConfig, containers: ContainerService, files: FileService, clock: Clock
) -> list[HostedTool]:
    """The shell tool always exists: it recognises shells that the client runs."""
    interpreter, shell = config.providers.code_interpreter, config.providers.shell
    settings = interpreter.settings
    inline = InlineLimits(file_bytes=settings.inline_bytes, total_bytes=settings.inline_total_bytes)
    hosted_shell = ShellTool(
        containers,
        clock,
        ShellToolSettings(
            execution_timeout=shell.settings.execution_timeout,
            keeps_processes=settings.isolation == "container",
            inline=inline,
            output=OutputLimits(
                model_output_characters=shell.settings.model_output_characters,
                stored_output_characters=shell.settings.stored_output_characters,
            ),
        ),
        files,
        enabled=shell.enabled and interpreter.enabled,
    )
    tools: list[HostedTool] = [hosted_shell]
    if interpreter.enabled:
        hosted_interpreter = CodeInterpreterTool(
            containers,
            clock,
            CodeInterpreterToolSettings(
                execution_timeout=settings.execution_timeout,
                keeps_variables=settings.isolation == "container",
                inline=inline,
                output=OutputLimits(
                    model_output_characters=settings.model_output_characters,
                    stored_output_characters=settings.stored_output_characters,
                ),
            ),
            files,
        )
        tools.insert(0, hosted_interpreter)
    return tools


def _list_hosted_types(config: GatewayConfig, tools: Sequence[HostedTool]) -> list[str]:
    """The tool types that this gateway serves."""
    runs_shells = config.providers.shell.enabled and config.providers.code_interpreter.enabled
    return sorted(
        kind for tool in tools if runs_shells or not isinstance(tool, ShellTool) for kind in tool.types
    )
