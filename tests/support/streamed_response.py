"""The events of a response, as OpenAI streams them, made from its body."""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, cast

from tests.support.responses_events import event

_PIECES = 25  # deltas of a text, at most


def encode_stream(body: Any) -> list[bytes]:
    """Each event of the stream in its bytes; the last one has the whole response."""
    fields = next(iter(_objects([body])), dict[str, Any]())
    status = fields.get("status")
    end = status if status in ("incomplete", "failed") else "completed"
    started = {"id": fields.get("id"), "status": "in_progress"}
    events: list[tuple[str, dict[str, Any]]] = [("response.created", {"response": started})]
    for index, item in enumerate(_objects(fields.get("output"))):
        events += [(kind, {"output_index": index, **more}) for kind, more in _item_events(item)]
    events.append((f"response.{end}", {"response": body}))
    numbers = count()
    return [event(kind, sequence_number=next(numbers), **more) for kind, more in events]


def _item_events(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    item_id = item.get("id")
    yield "response.output_item.added", {"item": {**item, "status": "in_progress", "outputs": None}}
    for kind, text in _texts(item):
        size = max(4, -(-len(text) // _PIECES))
        for start in range(0, len(text), size):
            yield f"response.{kind}.delta", {"item_id": item_id, "delta": text[start : start + size]}
    for part in _objects(item.get("content")):
        for note in _objects(part.get("annotations")):
            yield "response.output_text.annotation.added", {"item_id": item_id, "annotation": note}
    yield "response.output_item.done", {"item": item}


def _texts(item: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What of an item comes in deltas."""
    match item.get("type"):
        case "message":
            for part in _objects(item.get("content")):
                yield "output_text", str(part.get("text") or "")
                yield "refusal", str(part.get("refusal") or "")
        case "reasoning":
            for part in _objects(item.get("summary")):
                yield "reasoning_summary_text", str(part.get("text") or "")
            for part in _objects(item.get("content")):
                yield "reasoning_text", str(part.get("text") or "")
        case "code_interpreter_call":
            yield "code_interpreter_call_code", str(item.get("code") or "")
        case "function_call":
            yield "function_call_arguments", str(item.get("arguments") or "")
        case _:
            pass


def _objects(value: Any) -> list[dict[str, Any]]:
    values = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else ()
    return [one for one in values if isinstance(one, dict)]
