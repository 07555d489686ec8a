"""Claims, attaches and releases the sandboxes of containers."""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import msgspec

from fumehood.containers.container_runtime_state import ContainerContext, ContainerRuntimeState
from fumehood.containers.domain_secret_sealer import find_forbidden_domain
from fumehood.interfaces import Sandbox, SandboxProvider, SandboxRef
from fumehood.protocol.openai.container_objects import ContainerRecord
from fumehood.protocol.sandbox.sandbox_errors import (
    InvalidSandboxRequest,
    RetryLater,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxServerAtCapacity,
    SandboxStartFailed,
)
from fumehood.protocol.sandbox.sandbox_messages import SandboxSpec, Tenant
from fumehood.timed_steps import start_timing

logger = logging.getLogger(__name__)

_RELEASE_TIMEOUT = 10.0
_INITIAL_BACKOFF = 0.05
_MAX_BACKOFF = 1.0


def next_sandbox_name(record: ContainerRecord) -> str:
    """Name the container's next sandbox after its incarnation, so that a repeated claim finds the same one."""
    return f"{record.id}-{record.incarnation + 1}"


async def attach_sandbox(provider: SandboxProvider, record: ContainerRecord) -> Sandbox | None:
    """Return the container's sandbox, None if it has none or it is gone. Raises SandboxServerUnreachable."""
    if not record.sandbox:
        return None
    try:
        return await provider.attach(SandboxRef(record.sandbox, record.address))
    except (SandboxGone, SandboxNotFound):
        return None


def check_network_allowed(context: ContainerContext, record: ContainerRecord) -> None:
    """Raise InvalidSandboxRequest if the settings no longer allow the container's network."""
    if find_forbidden_domain(record.spec.network, context.settings.allowed_domains) is not None:
        raise InvalidSandboxRequest(
            "The network of this container is not allowed any more; create another one."
        )


async def claim_sandbox(context: ContainerContext, record: ContainerRecord, name: str) -> SandboxRef:
    """Claim a sandbox of that name, waiting up to `claim_timeout`. Raises SandboxError."""
    check_network_allowed(context, record)
    with context.stats.acquire_seconds.time(context.clock.monotonic):
        ref = await _claim_with_backoff(context, record, name)
    context.stats.sandbox_starts[start_kind(ref)] += 1
    return ref


async def _claim_with_backoff(context: ContainerContext, record: ContainerRecord, name: str) -> SandboxRef:
    clock, timeout = context.clock, context.settings.claim_timeout
    deadline = clock.monotonic() + timeout
    backoff = _INITIAL_BACKOFF
    spec = SandboxSpec(
        memory=record.spec.memory,
        network=context.domain_secrets.open_network(record),
        tenant=_to_sandbox_tenant(record.tenant),
    )
    while True:
        try:
            async with asyncio.timeout(timeout):
                return await context.provider.create(spec, name)
        except TimeoutError:
            raise SandboxServerAtCapacity(f"no sandbox was ready within {timeout:g} s.") from None
        except (
            RetryLater,
            SandboxStartFailed,
            SandboxGone,
        ):  # gone: the server has ended, and may start again
            if clock.monotonic() + backoff > deadline:
                raise
        await clock.sleep(backoff)
        backoff = min(backoff * 2, _MAX_BACKOFF)


def _to_sandbox_tenant(tenant: str) -> str:
    """Return the tenant's name, or its hash where sandbox servers would reject the name."""
    try:
        return msgspec.convert(tenant, Tenant)
    except msgspec.ValidationError:
        return hashlib.sha256(tenant.encode()).hexdigest()


@asynccontextmanager
async def ephemeral_sandbox(
    context: ContainerContext, state: ContainerRuntimeState
) -> AsyncGenerator[Sandbox]:
    """Claim an empty sandbox with the container's settings and release it after the block. Raises SandboxError."""
    with start_timing("acquire") as timing:
        ref = await claim_sandbox(context, state.record, f"{state.record.id}-{secrets.token_hex(4)}")
        state.ephemeral_sandboxes.add(ref)
        timing.set_attribute("start", start_kind(ref))
    try:
        yield await context.provider.attach(ref)
    finally:
        state.ephemeral_sandboxes.discard(ref)
        await release_sandbox(context.provider, ref)


async def release_sandbox(provider: SandboxProvider, ref: SandboxRef) -> None:
    """Destroy a sandbox. If that fails, the next sweep finds it as an orphan."""
    with suppress(TimeoutError):
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT):
                await provider.destroy(ref)
        except SandboxError as error:
            logger.warning("Could not destroy the sandbox %s: %s", ref.id, error.message)


def start_kind(ref: SandboxRef) -> str:
    """Return the metric label of how a claimed sandbox started."""
    return "new" if ref.from_warm_pool is None else "warm" if ref.from_warm_pool else "cold"
