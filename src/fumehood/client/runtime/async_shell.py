"""Performs the core's operations in an event loop of asyncio."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from typing import Any

from fumehood.client.runtime.blocking_shell import build_arguments, find_sdk_method
from fumehood.client.runtime.evaluation_lock import LockTicket
from fumehood.client.runtime.operations import (
    AwaitLock,
    CallFunction,
    CallingTask,
    CloseStream,
    EmitEvent,
    GetCallingTask,
    OpenedStream,
    OpenStream,
    Operation,
    ProbeServer,
    ReadStream,
    SendRequest,
    ServerReply,
    Sleep,
    Steps,
    StepsRunner,
)


class AsyncShell:
    """connect: returns the SDK's asynchronous client, on first use."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._sdk_client: Any = None
        self._open_streams: list[Any] = []

    async def run[T](self, steps: Steps[T]) -> T:
        """Run steps to their end, and drop their events."""
        runner = StepsRunner(steps)
        try:
            while await self.advance(runner) is not None:
                pass
            return runner.result
        finally:
            await self.aclose()

    async def advance(self, runner: StepsRunner[Any], context: Context | None = None) -> EmitEvent | None:
        """Run steps to their next event; None at their end. context: that of the steps, if not the caller's."""
        resume = runner.resume
        operation = resume() if context is None else context.run(resume)
        while operation is not None and not isinstance(operation, EmitEvent):
            result, error = None, None
            try:
                result = await self._perform_in(context, operation)
            except BaseException as raised:
                error = raised
            operation = resume(result, error) if context is None else context.run(resume, result, error)
        return operation

    async def aclose(self) -> None:
        """Close what steps that were ended have left open."""
        while self._open_streams:
            await self._open_streams.pop().__aexit__(None, None, None)

    async def perform(self, operation: Operation[Any]) -> object:
        match operation:
            case SendRequest():
                async with asyncio.timeout(operation.timeout):
                    method = self._find_method(operation.method, "with_raw_response")
                    reply = await method(**build_arguments(operation))
                return ServerReply(reply.content, reply.headers, reply.request_id)
            case OpenStream():
                async with asyncio.timeout(operation.timeout):
                    return await self._open_stream(operation)
            case ReadStream():
                async with asyncio.timeout(operation.timeout):
                    return await anext(operation.stream.source[1], b"")
            case CloseStream():
                self._open_streams.remove(operation.stream.source[0])
                return await operation.stream.source[0].__aexit__(None, None, None)
            case ProbeServer():
                return await self._client.get(
                    operation.path, cast_to=object, options={"timeout": operation.timeout}
                )
            case CallFunction():
                function = operation.function
                result = function() if operation.is_async else await run_in_thread(function)
                return await result if inspect.isawaitable(result) else result
            case Sleep():
                return await asyncio.sleep(operation.seconds)
            case AwaitLock():
                return await _wait_for_ticket(operation.ticket, operation.timeout)
            case GetCallingTask():
                return CallingTask(threading.get_ident(), asyncio.current_task())
            case _:
                raise AssertionError(f"unknown operation: {operation!r}")

    async def _perform_in(self, context: Context | None, operation: Operation[Any]) -> object:
        """Perform an operation in the context of the steps, so that a handler finds, say, the span of its call."""
        # The rest needs no context, and a task for each chunk would cost more than reading it.
        if context is None or not isinstance(operation, SendRequest | OpenStream | CallFunction):
            return await self.perform(operation)
        return await asyncio.get_running_loop().create_task(self.perform(operation), context=context)

    @property
    def _client(self) -> Any:
        if self._sdk_client is None:
            # The SDK's own retries ignore deadlines.
            self._sdk_client = self._connect().with_options(max_retries=0)
        return self._sdk_client

    def _find_method(self, path: str, variant: str) -> Callable[..., Any]:
        return find_sdk_method(self._client, path, variant)

    async def _open_stream(self, operation: OpenStream) -> OpenedStream:
        manager = self._find_method(operation.method, "with_streaming_response")(**build_arguments(operation))
        reply = await manager.__aenter__()
        self._open_streams.append(manager)
        return OpenedStream(reply.headers, reply.request_id, (manager, reply.iter_bytes()))


async def run_in_thread[T](function: Callable[[], T]) -> T:
    """Run a function in a thread. Cancellation waits until it has ended, so that it has no effect afterwards."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # otherwise it would be reported as never retrieved
        raise


async def _wait_for_ticket(ticket: LockTicket, timeout: float | None) -> bool:
    loop, granted = asyncio.get_running_loop(), asyncio.Event()
    ticket.add_callback(lambda: loop.call_soon_threadsafe(granted.set))
    try:
        async with asyncio.timeout(timeout):
            await granted.wait()
    except TimeoutError:
        return False
    return True
