"""Finds out whether a model server is there, and whether its URL is right."""

import asyncio

import msgspec
from msgspec import Raw

from fumehood.models.upstream.upstream_errors import UpstreamErrorFactory
from fumehood.models.upstream.upstream_server import UpstreamServer, decode_model_list
from fumehood.protocol.openai.api_errors import ModelError

PROBE_SECONDS = 3.0


class _ErrorReply(msgspec.Struct):
    error: Raw


async def probe_upstream(server: UpstreamServer, model: str, endpoint: str) -> str | None:
    """Ask a server for its models. Returns why it cannot serve, or None. It does not raise ModelError.

    model: the name in the message. endpoint: the path that turns are sent to.
    """
    errors = server.create_error_factory(model, f"{endpoint} endpoint")
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            await check_upstream(server, errors, endpoint)
    except TimeoutError:
        return errors.no_answer(PROBE_SECONDS).message
    except ModelError as error:
        return error.message
    return None


async def check_upstream(server: UpstreamServer, errors: UpstreamErrorFactory, endpoint: str) -> bytes | None:
    """The server's list of models, None if it has none. Raises ModelError if the server cannot serve."""
    status, body = await server.fetch("/models", errors)
    if status == 200 and not _is_error(body):
        decode_model_list(body, errors)
        return body
    if status in (200, 404, 405):
        await _check_endpoint(server, errors, endpoint)
    elif status in (401, 403) or status >= 500 or status < 400:
        raise errors.from_status(status, body)
    return None  # it answers, but not to this question


async def _check_endpoint(server: UpstreamServer, errors: UpstreamErrorFactory, endpoint: str) -> None:
    """A server without a list of models may have the endpoint: it then rejects the GET, but knows the path."""
    status, body = await server.fetch(endpoint, errors)
    if status == 404:
        raise errors.unknown_path(404)
    if status == 200:
        raise errors.from_event(body)


def _is_error(body: bytes) -> bool:
    """Whether this is an error that was sent with the status 200, as LM Studio does."""
    try:
        msgspec.json.decode(body, type=_ErrorReply)
    except (ValueError, RecursionError):
        return False
    return True
