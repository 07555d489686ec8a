"""Performs the core's operations in the calling thread."""

import inspect
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

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


def find_sdk_method(client: Any, path: str, variant: str) -> Callable[..., Any]:
    """Return a method of the SDK. path: such as "responses.create". variant: such as "with_raw_response"."""
    *resources, method = path.split(".")
    found = client
    for name in (*resources, variant, method):
        found = getattr(found, name)
    return cast("Callable[..., Any]", found)


def build_arguments(operation: SendRequest | OpenStream) -> dict[str, Any]:
    """Return the keyword arguments of the SDK's method."""
    timeout = {} if operation.timeout is None else {"timeout": operation.timeout}
    return {**operation.arguments, **timeout}


class BlockingShell:
    """connect: returns the SDK's client, on first use. sleep: for tests and for cancellation."""

    def __init__(
        self,
        connect: Callable[[], Any] | None = None,
        *,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._connect = connect
        self._sleep = sleep
        self._sdk_client: Any = None
        self._open_streams: list[_BlockingStream] = []

    def run[T](self, steps: Steps[T]) -> T:
        """Run steps to their end, and drop their events."""
        runner = StepsRunner(steps)
        try:
            while self.advance(runner) is not None:
                pass
            return runner.result
        finally:
            self.close()

    def advance(self, runner: StepsRunner[Any]) -> EmitEvent | None:
        """Run steps to their next event; None at their end."""
        operation = runner.resume()
        while operation is not None and not isinstance(operation, EmitEvent):
            result, error = None, None
            try:
                result = self.perform(operation)
            except BaseException as raised:
                error = raised
            operation = runner.resume(result, error)
        return operation

    def close(self) -> None:
        """Close what steps that were ended have left open."""
        while self._open_streams:
            self._open_streams.pop().close()

    def perform(self, operation: Operation[Any]) -> object:
        match operation:
            case SendRequest():
                reply = self._find_method(operation.method, "with_raw_response")(**build_arguments(operation))
                return ServerReply(reply.content, reply.headers, reply.request_id)
            case OpenStream():
                return self._open_stream(operation)
            case ReadStream():
                return operation.stream.source.read(operation.timeout)
            case CloseStream():
                self._open_streams.remove(operation.stream.source)
                return operation.stream.source.close()
            case ProbeServer():
                return self._client.get(
                    operation.path, cast_to=object, options={"timeout": operation.timeout}
                )
            case CallFunction():
                return _refuse_awaitable(operation.function())
            case Sleep():
                return self._sleep(operation.seconds)
            case AwaitLock():
                return operation.ticket.wait(operation.timeout)
            case GetCallingTask():
                return CallingTask(threading.get_ident())
            case _:
                raise AssertionError(f"unknown operation: {operation!r}")

    @property
    def _client(self) -> Any:
        if self._sdk_client is None and self._connect is not None:
            # The SDK's own retries ignore deadlines.
            self._sdk_client = self._connect().with_options(max_retries=0)
        return self._sdk_client

    def _find_method(self, path: str, variant: str) -> Callable[..., Any]:
        return find_sdk_method(self._client, path, variant)

    def _open_stream(self, operation: OpenStream) -> OpenedStream:
        manager = self._find_method(operation.method, "with_streaming_response")(**build_arguments(operation))
        stream = _BlockingStream(manager)
        self._open_streams.append(stream)
        return OpenedStream(stream.reply.headers, stream.reply.request_id, stream)


class _BlockingStream:
    """A reply that is read in chunks, until its deadline at most. manager: the SDK's context manager of it."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.reply = manager.__enter__()
        self._chunks = self.reply.iter_bytes()
        self._timer: threading.Timer | None = None
        self._disconnects_at = math.inf

    def read(self, timeout: float | None) -> bytes:
        """timeout: the time until the deadline. The SDK's own timeout starts again with every chunk."""
        if timeout is not None and (ends_at := time.monotonic() + timeout) < self._disconnects_at - 0.01:
            if self._timer is not None:
                self._timer.cancel()
            self._disconnects_at = ends_at
            self._timer = threading.Timer(timeout, self._disconnect)
            self._timer.daemon = True
            self._timer.start()
        return next(self._chunks, b"")

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._manager.__exit__(None, None, None)

    def _disconnect(self) -> None:
        """Wake the reading thread, for which the connection seems to break."""
        import socket

        connection = self.reply.http_response.extensions.get("network_stream")
        if connection is not None:
            with suppress(OSError):
                connection.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


def _refuse_awaitable(result: object) -> object:
    """Raise TypeError for the result of an asynchronous function, which nobody could await here."""
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError("it is asynchronous; use aevaluate or astream")
    return result
