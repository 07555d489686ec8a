"""Puts a gateway together from its configuration, and takes it apart again; imports everything below it."""

import asyncio
import contextlib
import importlib
import logging
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fumehood.config import CodeInterpreterSettings, Config, FileSettings, Misconfigured, secret
from fumehood.engine.log import LagLimits
from fumehood.engine.loop import LoopLimits
from fumehood.engine.runs import EngineRuns
from fumehood.figures import Figures
from fumehood.files.fetching import Fetcher, FetchLimits, Passing
from fumehood.files.inputs import InputFiles, InputLimits
from fumehood.files.uploads import UploadedFiles, UploadSettings
from fumehood.gateway.app import Gateway
from fumehood.gateway.auth import Callers, Everybody, KeyHolders
from fumehood.gateway.lag import LoopLag
from fumehood.gateway.limits import Limits
from fumehood.gateway.metrics import Metrics
from fumehood.gateway.origins import ANY, Origins
from fumehood.gateway.request_log import RequestLines, RequestLog, to_logging
from fumehood.gateway.server import Server
from fumehood.interfaces import (
    Amount,
    Clock,
    Containers,
    Files,
    HostedTool,
    Models,
    Runs,
    SandboxProvider,
    Store,
)
from fumehood.models.registry import open_models
from fumehood.protocol.file_types import AcceptedTypes
from fumehood.protocol.folding import OUTPUTS
from fumehood.protocol.keys import KeyLimits
from fumehood.protocol.sandbox_errors import SandboxError
from fumehood.sandbox.container import ContainerSettings
from fumehood.sandbox.containers import SandboxContainers
from fumehood.sandbox.kept_files import FileLimits
from fumehood.sandbox.local import LocalSandboxes, LocalSettings
from fumehood.sandbox.readiness import SandboxReadiness
from fumehood.sandbox.remote import RemoteSandboxes
from fumehood.serving.addresses import networks
from fumehood.serving.exchange import Application
from fumehood.store.blobs import DiskBlobs
from fumehood.store.referred_blobs import ReferredBlobs
from fumehood.store.sealing import KeyedSealer, KeysRefused, own_keys, read_keys, read_keys_file
from fumehood.store.sqlite import SqliteStore, StoreRefused
from fumehood.tools.code_interpreter import CodeInterpreter
from fumehood.tools.code_output import OutputLimits
from fumehood.tools.code_session import InterpreterSettings
from fumehood.tools.produced import InlineLimits
from fumehood.tools.shell import Shell
from fumehood.tools.shell_session import ShellSettings

if TYPE_CHECKING:
    from fumehood.telemetry.signals import Signals

CODE_INTERPRETER = "code_interpreter"
_SIGNALS = ("TRACES", "METRICS", "LOGS")
_ENDPOINTS = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    *(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT" for signal in _SIGNALS),
)

logger = logging.getLogger(__name__)


class CannotServe(Exception):
    """Something that the configuration asks for cannot be had here; says what, and what to do."""


class SystemClock:
    """A `Clock` that tells the time of this machine."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Assembled:
    """A gateway with everything behind and around it, ready to be served; `open` if no key is needed."""

    app: Application
    runs: Runs
    metrics: Metrics
    open: bool


async def serve(
    config: Config, environ: Mapping[str, str], sock: socket.socket, on_ready: Callable[[Assembled], None]
) -> None:
    """Until a signal comes; raises Misconfigured, CannotServe."""
    lines = RequestLines(_to_standard_error, config.telemetry.log_format)
    async with assembled(config, environ, lines) as parts:
        server = Server(
            parts.app,
            sock,
            lambda: parts.runs.drain(config.server.grace),
            on_stalled=parts.metrics.stalled,
        )
        await server.run(lambda: on_ready(parts))
    lines.flush()


def _to_standard_error(lines: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more
        sys.stderr.write(lines)
        sys.stderr.flush()


@asynccontextmanager
async def assembled(
    config: Config, environ: Mapping[str, str], log: RequestLog = to_logging
) -> AsyncGenerator[Assembled]:
    """Everything that the configuration asks for, until the block is left; then it is closed, last things first.

    Raises Misconfigured, CannotServe.
    """
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        figures = Figures()
        store = await _store(config, figures, stack)
        callers = await _callers(config, store, clock, stack)
        keyless = not isinstance(callers, KeyHolders) or callers.open
        _check_pages(config, keyless)
        blobs = await _blobs(config, store, clock, stack)
        files = await stack.enter_async_context(
            UploadedFiles(store, blobs, clock, _upload_settings(config.files))
        )
        models = _models(config, clock, environ, figures, stack)
        signals = open_signals(config, environ, figures, stack)
        chosen = config.providers.code_interpreter
        sandboxes = await _sandboxes(chosen.settings, environ, stack, start=chosen.enabled)
        metrics = _metrics(config, figures, sandboxes)
        stack.enter_context(LoopLag(metrics.loop_lag))
        sealer = _sealer(config, environ)
        containers = await stack.enter_async_context(
            SandboxContainers(
                sandboxes,
                store,
                blobs,
                clock,
                _container_settings(config),
                sealer=sealer,
                uploads=files,
                figures=figures.containers,
            )
        )
        tools = _tools(config, containers, files, clock)
        runs: Runs = EngineRuns(
            models if signals is None else signals.models(models),
            tools if signals is None else signals.tools(tools),
            store,
            clock,
            limits=LoopLimits(
                turns=config.limits.turns,
                seconds=config.limits.response_seconds,
                characters=config.limits.turn_characters,
            ),
            lag=LagLimits(events=config.limits.behind_events, seconds=config.limits.behind_seconds),
            disabled_tools=frozenset() if chosen.enabled else frozenset({CODE_INTERPRETER}),
            sealer=sealer,
            attachments=_attachments(config, files, stack),
            figures=figures,
        )
        if signals is not None:
            runs = signals.runs(runs)
        gateway = Gateway(
            runs=runs,
            store=store,
            models=models,
            containers=containers,
            files=files,
            file_bytes=config.files.file_bytes,
            callers=callers,
            origins=Origins(config.server.cors_origins),
            metrics=metrics,
            log=log,
            limits=_limits(config, clock),
            always_include=(OUTPUTS,) if chosen.settings.always_include_outputs else (),
            slowest=config.limits.body_bytes_per_second,
            show_metrics=config.telemetry.metrics,
            pass_fields={name for model in config.models for name in model.pass_fields},
            unready=SandboxReadiness(sandboxes, clock) if chosen.enabled else None,
        )
        app = gateway if signals is None else signals.edge(gateway)
        yield Assembled(app, runs, metrics, keyless)


def _check_pages(config: Config, keyless: bool) -> None:
    """Raises Misconfigured."""
    if keyless and ANY in config.server.cors_origins:
        raise Misconfigured(
            "server.cors_origins: without keys, * would let every web page run code here: name the origins, or "
            "make a key with `fumehood keys create`."
        )


def _models(
    config: Config, clock: Clock, environ: Mapping[str, str], figures: Figures, stack: AsyncExitStack
) -> Models:
    """Raises Misconfigured."""
    try:
        models = open_models(config.models, clock, environ, figures.models)
    except ValueError as error:
        raise Misconfigured(f"models: {error}.") from None
    stack.push_async_callback(models.close)
    return models


def _limits(config: Config, clock: Clock) -> Limits:
    limits = config.limits
    usual = KeyLimits(
        requests_per_minute=limits.requests_per_minute,
        concurrent=limits.concurrent,
        body_bytes=limits.body_bytes,
    )
    return Limits(
        usual,
        total=limits.concurrent_total,
        body_bytes_total=limits.body_bytes_total,
        monotonic=clock.monotonic,
    )


def _sealer(config: Config, environ: Mapping[str, str]) -> KeyedSealer:
    """Raises Misconfigured."""
    settings = config.compaction
    own = config.storage.file.with_name(config.storage.file.name + ".keys")
    where = settings.keys_env or settings.keys_file or str(own)
    try:
        if settings.keys_env is not None:
            keys = read_keys(secret(environ, settings.keys_env, "compaction.keys_env") or "")
        else:
            keys = own_keys(own) if settings.keys_file is None else read_keys_file(Path(settings.keys_file))
        return KeyedSealer(keys)
    except KeysRefused as error:
        raise Misconfigured(f"compaction: {where}: {error}.") from None


def open_signals(
    config: Config, environ: Mapping[str, str], figures: Figures, stack: AsyncExitStack
) -> "Signals | None":
    """None, and nothing imported, unless the operator says where to; raises Misconfigured."""
    endpoint = config.telemetry.otlp
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if not endpoint and not any(environ.get(variable) for variable in _ENDPOINTS):
        return None
    _check_variables(environ)
    try:
        from fumehood.telemetry.signals import Signals, SignalSettings
    except ModuleNotFoundError as error:
        raise Misconfigured("telemetry.otlp: it needs an extra: pip install 'fumehood[otel]'.") from error
    settings = SignalSettings(
        endpoint=endpoint,
        profile=config.telemetry.profile,
        content_bytes=config.telemetry.content_bytes,
        redact=find_redactor(config.telemetry.redact),
        models=[model.match for model in config.models if not model.is_pattern],
    )
    signals = Signals(settings, environ, figures)
    stack.push_async_callback(signals.close)
    return signals


def find_redactor(named: str | None) -> Callable[[str], str] | None:
    """The operator's own function; raises Misconfigured."""
    if named is None:
        return None
    module, _, name = named.partition(":")
    try:
        found: object = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise Misconfigured(f"telemetry.redact: {named} cannot be found: {error}.") from error
    if not callable(found):
        raise Misconfigured(f"telemetry.redact: {named} is no function.")

    def redact(text: str) -> str:
        said = found(text)
        if not isinstance(said, str):
            raise TypeError(f"{named} gave back no text")
        return said

    return redact


def _check_variables(environ: Mapping[str, str]) -> None:
    """Whoever chose another way of sending, or no address, would wait for it in vain. Raises Misconfigured."""
    for variable in _ENDPOINTS:
        address = environ.get(variable, "").strip().lower()
        if address and not address.startswith(("http://", "https://")):
            raise Misconfigured(f"{variable}: an address is written as http://HOST:4318.")
    for signal in _SIGNALS:
        variable = f"OTEL_{signal}_EXPORTER"
        if environ.get(variable, "otlp").strip().lower() not in ("", "otlp", "none"):
            raise Misconfigured(f"{variable}: otlp and none are there.")
    for infix in ("", *(f"{signal}_" for signal in _SIGNALS)):
        variable = f"OTEL_EXPORTER_OTLP_{infix}PROTOCOL"
        if environ.get(variable, "http/protobuf").strip().lower() not in ("", "http/protobuf"):
            raise Misconfigured(f"{variable}: only http/protobuf is there.")


def _metrics(config: Config, figures: Figures, sandboxes: SandboxProvider) -> Metrics:
    """A sandbox server elsewhere is somebody else's too, and tells its figures itself."""
    embedded = sandboxes if isinstance(sandboxes, LocalSandboxes) else None
    if not config.providers.code_interpreter.enabled:
        embedded = None
    return Metrics(
        figures,
        disks={"database": config.storage.file.parent, "blobs": Path(config.storage.blobs)},
        sandboxes=None if embedded is None else embedded.metrics,
    )


async def _store(config: Config, figures: Figures, stack: AsyncExitStack) -> SqliteStore:
    try:
        store = await SqliteStore.open(config.storage.file, figures=figures.store)
    except StoreRefused as error:
        raise CannotServe(str(error)) from error
    stack.push_async_callback(store.close)
    if lost := await store.recover():
        logger.warning("responses_lost", extra={"fields": {"number": lost}})
    return store


async def _blobs(config: Config, store: SqliteStore, clock: Clock, stack: AsyncExitStack) -> ReferredBlobs:
    directory = Path(config.storage.blobs)
    try:
        disk = DiskBlobs(directory, await store.identity(), config.storage.spare_bytes)
    except StoreRefused as error:
        raise CannotServe(str(error)) from error
    except OSError as error:
        raise CannotServe(f"storage.blobs: {directory} cannot be used: {error.strerror}.") from error
    return await stack.enter_async_context(ReferredBlobs(disk, store).swept(clock))


def _upload_settings(settings: FileSettings) -> UploadSettings:
    return UploadSettings(
        file_bytes=settings.file_bytes,
        tenant=Amount(settings.tenant_files, settings.tenant_bytes),
        at_once=settings.uploads_at_once,
        types=AcceptedTypes(settings.types),
    )


async def _callers(config: Config, store: Store, clock: Clock, stack: AsyncExitStack) -> Callers:
    """Those who have a key. Who may reach an open server at all, the caller has made sure of."""
    everybody = Everybody(config.server.hosts)
    if not config.auth.required:
        return everybody
    holders = await stack.enter_async_context(KeyHolders(store, clock, everybody))
    if not holders.number and not config.server.private:
        raise Misconfigured(
            f"server.host: {config.server.host} can be reached from other machines and there are no keys: make one "
            "with `fumehood keys create`, or listen on 127.0.0.1."
        )
    if not holders.number and not holders.open:
        logger.warning("all keys were revoked: nobody can be served until `fumehood keys create` makes one")
    return holders


def _container_settings(config: Config) -> ContainerSettings:
    settings = config.providers.code_interpreter.settings
    return ContainerSettings(
        isolation=settings.isolation,
        claim_timeout=settings.claim_timeout,
        containers_per_tenant=config.limits.containers_per_tenant,
        allowed_domains=frozenset(settings.allowed_domains),
        idle_minutes=settings.idle_minutes,
        longest_idle_minutes=settings.longest_idle_minutes,
        life_hours=settings.life_hours,
        retention_hours=settings.retention_hours,
        retained_bytes=settings.retained_bytes,
        files=FileLimits(
            file_bytes=settings.file_bytes,
            container_bytes=settings.container_bytes,
            files=settings.container_files,
        ),
        uploads_at_once=config.files.uploads_at_once,
        sandboxes_outlive=settings.sandbox_url is not None,
        alone=True,  # one process has the database, and keeps others away
    )


def _attachments(config: Config, files: Files, stack: AsyncExitStack) -> InputFiles:
    """Who finds the files of requests; nothing is fetched from anywhere unless the operator says so."""
    settings = config.inputs
    addresses: Fetcher | Passing | None = None
    private = networks(settings.fetch_networks)
    if settings.fetch_urls:
        limits = FetchLimits(bytes=settings.fetch_bytes, seconds=settings.fetch_seconds)
        addresses = Fetcher(limits, private)
        stack.callback(addresses.close)
    elif settings.pass_urls:
        addresses = Passing(private)
    return InputFiles(
        files, addresses, InputLimits(picture_bytes=settings.picture_bytes, file_bytes=settings.file_bytes)
    )


def _tools(config: Config, containers: Containers, files: Files, clock: Clock) -> list[HostedTool]:
    """The shell is there in any case: it knows which shells are the client's own."""
    interpreter, shell = config.providers.code_interpreter, config.providers.shell
    settings = interpreter.settings
    inline = InlineLimits(file_bytes=settings.inline_bytes, total_bytes=settings.inline_total_bytes)
    hosted_shell = Shell(
        containers,
        clock,
        ShellSettings(
            execution_timeout=shell.settings.execution_timeout,
            keeps_processes=settings.isolation == "container",
            inline=inline,
            output=OutputLimits(
                model_characters=shell.settings.model_characters,
                kept_characters=shell.settings.kept_characters,
            ),
        ),
        files,
        enabled=shell.enabled and interpreter.enabled,
    )
    if not interpreter.enabled:
        return [hosted_shell]
    hosted_interpreter = CodeInterpreter(
        containers,
        clock,
        InterpreterSettings(
            execution_timeout=settings.execution_timeout,
            keeps_variables=settings.isolation == "container",
            inline=inline,
            output=OutputLimits(
                model_characters=settings.model_characters, kept_characters=settings.kept_characters
            ),
        ),
        files,
    )
    return [hosted_interpreter, hosted_shell]


async def _sandboxes(
    settings: CodeInterpreterSettings, environ: Mapping[str, str], stack: AsyncExitStack, *, start: bool
) -> RemoteSandboxes | LocalSandboxes:
    """A server elsewhere, or one of our own, started at once: if code cannot be isolated, nothing is served."""
    if settings.sandbox_url is not None:
        token = secret(
            environ, settings.sandbox_token_env, "providers.code_interpreter.settings.sandbox_token_env"
        )
        remote = RemoteSandboxes(settings.sandbox_url, token=token)
        stack.push_async_callback(remote.close)
        return remote
    local = LocalSandboxes(_local_settings(settings, environ))
    stack.push_async_callback(local.close)
    if start:
        try:
            await local.start()
        except SandboxError as error:
            raise CannotServe(f"{error.message} `fumehood doctor` says what to do.") from error
    return local


def _local_settings(settings: CodeInterpreterSettings, environ: Mapping[str, str]) -> LocalSettings:
    variables = {name: value for name, value in environ.items() if _is_for_sandboxes(name)}
    if settings.allowed_domains:
        variables["FUMEHOOD_SANDBOX_EGRESS"] = "allowlist"
        if "*" not in settings.allowed_domains:
            variables["FUMEHOOD_SANDBOX_EGRESS_DOMAINS"] = ",".join(settings.allowed_domains)
    return LocalSettings(
        mode=settings.sandbox_mode,
        limits=settings.sandbox_limits,
        pool=settings.sandbox_pool,
        capacity=settings.sandbox_capacity,
        options=()
        if settings.sandbox_config is None
        else ("--config", str(Path(settings.sandbox_config).absolute())),
        environment=variables,
    )


def _is_for_sandboxes(variable: str) -> bool:
    """Whether the sandbox server may know it: its settings, and where packages come from, which may hold a password."""
    if variable.startswith("FUMEHOOD_SANDBOX_"):
        return variable not in (
            "FUMEHOOD_SANDBOX_TOKEN",
            "FUMEHOOD_SANDBOX_METRICS_TOKEN",
            "FUMEHOOD_SANDBOX_CONFIG",
        )
    return variable in ("FUMEHOOD_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
