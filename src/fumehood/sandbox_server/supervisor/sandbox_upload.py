"""Streams an upload to a helper process, with limits on size and time.

Nothing is buffered: the next chunk is read when the helper has accepted the last one.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from typing import Any, Literal

import msgspec

from fumehood.protocol.sandbox.sandbox_errors import FileRefused, SandboxPayloadTooLarge
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.supervisor.file_helper_processes import HelperProcess

_CHUNK_BYTES = 256 * 1024


class _HelperQuestion(msgspec.Struct, frozen=True):
    """What `inside.files.quota_requests` asks."""

    permit: Literal["reserve", "confirm_complete"]
    size: int


class UploadSourceFailed(Exception):
    """Reading the content failed; `error` is what its iterator raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class SandboxUpload:
    """One upload through a socket pair; close it in the end.

    subject: its name in messages.
    free_memory: returns how many bytes the sandbox may still store; None without limit.
    helper_socket: the helper's end, to be passed to the helper before `run`.
    """

    def __init__(
        self,
        subject: str,
        content: bytes | AsyncIterable[bytes],
        limit: int,
        free_memory: Callable[[], int | None],
        settings: SandboxServerSettings,
    ) -> None:
        self._subject = subject
        self._content = content
        self._limit = limit
        self._free_memory = free_memory
        self._settings = settings
        self._sent_bytes = 0
        self._own_socket, self.helper_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._own_socket.setblocking(False)

    def close(self) -> None:
        self._own_socket.close()
        self.helper_socket.close()

    async def run(self, helper: HelperProcess) -> dict[str, Any]:
        """Send the content, answer the helper's questions, return its answer; EOFError if it ended without one."""
        self.helper_socket.close()  # the helper has it, or a duplicate is queued
        sending = asyncio.ensure_future(self._send_content(self._own_socket))
        try:
            async with asyncio.timeout(self._settings.transfer_timeout):
                return await self._answer_questions(helper, sending)
        except TimeoutError:
            raise self._refused_error(
                f"the transfer took longer than {self._settings.transfer_timeout:g} s"
            ) from None
        finally:
            sending.cancel()
            self._own_socket.close()  # the helper reads end of file
            await asyncio.gather(sending, return_exceptions=True)

    async def _answer_questions(self, helper: HelperProcess, sending: asyncio.Future[None]) -> dict[str, Any]:
        while True:
            receiving = asyncio.ensure_future(helper.receive())
            try:
                if not sending.done():
                    await asyncio.wait({receiving, sending}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
                    # Everything is sent: a helper that makes progress sends something every few seconds.
                    await asyncio.wait({receiving}, timeout=self._settings.transfer_idle_timeout)
                if not receiving.done():
                    if sending.done():
                        raise self._stalled_error()
                    continue
                message, opened = receiving.result()
            finally:
                receiving.cancel()
            for fd in opened:
                os.close(fd)
            if "permit" not in message:
                return message
            try:
                question = msgspec.convert(message, _HelperQuestion)
            except msgspec.ValidationError:
                raise EOFError from None
            helper.send(self._answer_question(question, finished=sending.done()))

    def _answer_question(self, question: _HelperQuestion, *, finished: bool) -> dict[str, Any]:
        if question.permit == "confirm_complete":
            if finished and question.size == self._sent_bytes:
                return {"granted": True}
            return {"granted": False, "kind": "refused", "reason": "it did not arrive whole"}
        free = self._free_memory()
        if free is None or question.size <= free:
            return {"granted": True}
        reason = "it does not fit into the sandbox's memory, of which files are a part"
        return {"granted": False, "kind": "refused", "reason": reason}

    async def _send_content(self, sock: socket.socket) -> None:
        try:
            async with contextlib.aclosing(self._iter_content()) as chunks:
                async for chunk in chunks:
                    self._sent_bytes += len(chunk)
                    if self._sent_bytes > self._limit:
                        raise SandboxPayloadTooLarge(f"{self._subject}: larger than {self._limit} bytes")
                    await self._send_chunk(sock, chunk)
            sock.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the helper refused, and its answer says why

    async def _send_chunk(self, sock: socket.socket, chunk: bytes) -> None:
        loop = asyncio.get_running_loop()
        view = memoryview(chunk)
        while view:
            try:
                async with asyncio.timeout(self._settings.transfer_idle_timeout):
                    await loop.sock_sendall(sock, view[:_CHUNK_BYTES])
            except TimeoutError:
                raise self._stalled_error() from None
            view = view[_CHUNK_BYTES:]

    async def _iter_content(self) -> AsyncGenerator[bytes]:
        if isinstance(self._content, bytes):
            yield self._content
            return
        source: AsyncIterator[bytes] = aiter(self._content)
        while True:
            timeout = asyncio.timeout(self._settings.transfer_idle_timeout)
            try:
                async with timeout:
                    chunk = await anext(source)
            except StopAsyncIteration:
                return
            except Exception as error:
                if not timeout.expired():
                    raise UploadSourceFailed(error) from error
                raise self._refused_error(
                    f"nothing of it arrived for {self._settings.transfer_idle_timeout:g} s"
                ) from None
            yield chunk

    def _stalled_error(self) -> FileRefused:
        return self._refused_error(
            f"the sandbox took nothing of it for {self._settings.transfer_idle_timeout:g} s"
        )

    def _refused_error(self, reason: str) -> FileRefused:
        return FileRefused(f"{self._subject}: {reason}")
