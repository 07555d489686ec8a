"""A client without any library's opinion that checks whatever it gets.

Responses and events have to fit the types of the OpenAI SDK, and the OpenResponses document where that is here.
"""

import functools
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs
from openai.types.responses import CompactedResponse, Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support import sse_parsing
from tests.support.gateway_process import text_answer, tool_call, tool_calls
from tests.support.raw_model_server import ReceivedRequest, Responder

DOCUMENT = Path(__file__).parents[3] / "shared" / "reference" / "openresponses-openapi.json"
CLOSING = ("response.completed", "response.incomplete", "response.failed")

_responses: TypeAdapter[Any] = TypeAdapter(Response)
_compactions: TypeAdapter[Any] = TypeAdapter(CompactedResponse)
_events: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


# --- what is checked ----------------------------------------------------------------------------------


def check_response(body: Any) -> Any:
    """Raises what pydantic raises, or says where the document is not kept to."""
    _responses.validate_python(body)
    _check("ResponseResource", body)
    return body


def check_compaction(body: Any) -> Any:
    _compactions.validate_python(body)
    _check("CompactResource", body)
    return body


def check_event(event: Any) -> None:
    _events.validate_python(event)
    if schema := _schemas_of_events().get(event["type"]):
        _check(schema, event)


def check_stream(events: list[Any]) -> Any:
    """Every event, their numbers and their pairs; the response that they end with."""
    for event in events:
        check_event(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert [kind for kind in kinds if kind in CLOSING] == kinds[-1:]
    for opened, closed in (
        ("response.output_item.added", "response.output_item.done"),
        ("response.content_part.added", "response.content_part.done"),
    ):
        assert kinds.count(opened) == kinds.count(closed)
    return check_response(events[-1]["response"])


def _check(schema: str, value: Any) -> None:
    validator = _validator(schema)
    found = (
        [f"{error.instance_path}: {error.message}" for error in validator.iter_errors(value)]
        if validator
        else []
    )
    assert not found, schema


@functools.cache
def _document() -> Any:
    return json.loads(DOCUMENT.read_text()) if DOCUMENT.exists() else None


@functools.cache
def _schemas_of_events() -> dict[str, str]:
    schemas: dict[str, Any] = _document()["components"]["schemas"] if _document() else {}
    return {
        schema["properties"]["type"]["enum"][0]: name
        for name, schema in schemas.items()
        if name.endswith("StreamingEvent")
    }


@functools.cache
def _validator(schema: str) -> Any:
    if _document() is None:
        return None
    whole = {"$ref": f"#/components/schemas/{schema}", "components": _document()["components"]}
    return jsonschema_rs.Draft202012Validator(whole)


# --- who asks -----------------------------------------------------------------------------------------


class ComplianceClient:
    """`POST /responses` and what belongs to it, at one base URL."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.session.request(method, self.url + path, json=body) as answered:
            return answered.status, await answered.json()

    async def create(self, **body: Any) -> Any:
        status, response = await self.ask("POST", "/responses", {"model": "scripted", **body})
        assert status == 200, response
        return check_response(response)

    async def stream(self, **body: Any) -> list[Any]:
        events = await self.unchecked(**body)
        check_stream(events)
        return events

    async def unchecked(self, **body: Any) -> list[Any]:
        """The same for what OpenResponses does not know: hosted tools and their items."""
        request = {"model": "scripted", "stream": True, **body}
        async with self.session.post(self.url + "/responses", json=request) as answered:
            assert answered.status == 200
            assert answered.content_type == "text/event-stream"
            return [event for _, event in sse_parsing.parse_events(await answered.read())]

    async def refused(self, **body: Any) -> tuple[int, Any]:
        """The status and the error, which has exactly OpenAI's fields."""
        status, found = await self.ask("POST", "/responses", {"model": "scripted", **body})
        assert 400 <= status < 500
        assert found["error"].keys() == {"message", "type", "param", "code"}
        return status, found["error"]

    @asynccontextmanager
    async def socket(self) -> AsyncGenerator["ComplianceWebSocket"]:
        async with self.session.ws_connect(self.url + "/responses") as connection:
            yield ComplianceWebSocket(connection)


class ComplianceWebSocket:
    """`/responses` over WebSocket: what is sent is a request, what comes back is the events of its response."""

    def __init__(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        self._connection = connection

    async def create(self, **body: Any) -> Any:
        """The response, whose events are checked."""
        events = [event async for event in self._ask(body)]
        return check_stream(events)

    async def refused(self, **body: Any) -> tuple[int, Any]:
        (event,) = [event async for event in self._ask(body)]
        assert event["type"] == "error"
        assert event["error"].keys() == {"message", "type", "param", "code"}
        return event["status"], event["error"]

    async def _ask(self, body: Any) -> AsyncGenerator[Any]:
        await self._connection.send_json({"type": "response.create", "model": "scripted", **body})
        while True:
            event = await self._connection.receive_json()
            yield event
            if event["type"] in (*CLOSING, "error"):
                return


@asynccontextmanager
async def connect(url: str) -> AsyncGenerator[ComplianceClient]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield ComplianceClient(url, session)


def get_text(response: Any) -> str:
    """What the model said, and nothing but that."""
    (message,) = [item for item in response["output"] if item["type"] == "message"]
    (part,) = message["content"]
    assert message["status"] == "completed"
    return part["text"]


# --- who answers --------------------------------------------------------------------------------------


async def mirror(asked: ReceivedRequest, writer: Any) -> bool:
    """A model that calls the first tool it is offered, and else tells what it was shown. It needs no script, so many
    may ask at once.
    """
    body = asked.json
    if body.get("tools") and body["messages"][-1]["role"] != "tool":
        name = body["tools"][0]["function"]["name"]
        reply: Responder = tool_calls(
            tool_call(name, {"location": "San Francisco, CA"}, call_id=f"call_{asked.connection}")
        )
    else:
        text = " | ".join(
            f"{message['role']}: {_texts_of(message['content'])}" for message in body["messages"]
        )
        third = -(-len(text) // 3)
        reply = text_answer(*(text[place : place + third] for place in range(0, len(text), third)))
    return await reply(asked, writer)


def _texts_of(parts: str | list[Any] | None) -> str:
    if not isinstance(parts, list):
        return str(parts)
    return " + ".join(part.get("text") or json.dumps(part[part["type"]]) for part in parts)
