"""What servers of the Responses API say, for the scripted server of `chat_server`."""

from collections.abc import Mapping

import msgspec


def event(kind: str, **fields: object) -> bytes:
    """One event of a stream."""
    payload = msgspec.json.encode({"type": kind, **fields})
    return f"event: {kind}\n".encode() + b"data: " + payload + b"\n\n"


def response(status: str = "completed", **fields: object) -> dict[str, object]:
    return {"id": "resp_theirs", "object": "response", "status": status, "output": [], **fields}


def created() -> bytes:
    return event("response.created", response=response("in_progress")) + event(
        "response.in_progress", response=response("in_progress")
    )


def ended(status: str = "completed", **fields: object) -> bytes:
    return event(f"response.{status}", response=response(status, **fields))


def added(index: int, **item: object) -> bytes:
    return event("response.output_item.added", output_index=index, item=item)


def done(index: int, **item: object) -> bytes:
    return event("response.output_item.done", output_index=index, item=item)


def delta(kind: str, index: int, text: str, **more: object) -> bytes:
    """`kind` as in response.KIND.delta."""
    return event(f"response.{kind}.delta", output_index=index, item_id="theirs", delta=text, **more)


def message(*texts: str, index: int = 0, phase: str | None = None) -> bytes:
    """A message in these pieces."""
    more: Mapping[str, object] = {} if phase is None else {"phase": phase}
    part: dict[str, object] = {"type": "output_text", "text": "".join(texts), "annotations": []}
    whole = {"type": "message", "id": "msg_theirs", "role": "assistant", **more}
    return b"".join(
        [
            added(index, **whole, content=[], status="in_progress"),
            event(
                "response.content_part.added", output_index=index, content_index=0, part=part | {"text": ""}
            ),
            *(delta("output_text", index, text, content_index=0, logprobs=[]) for text in texts),
            event(
                "response.output_text.done",
                output_index=index,
                content_index=0,
                text="".join(texts),
                logprobs=[],
            ),
            event("response.content_part.done", output_index=index, content_index=0, part=part),
            done(index, **whole, content=[part], status="completed"),
        ]
    )


def call(name: str, *pieces: str, index: int = 0, call_id: str = "call_theirs", **more: object) -> bytes:
    """A call of a function, its arguments in these pieces."""
    whole = {"type": "function_call", "id": "fc_theirs", "call_id": call_id, "name": name, **more}
    arguments = "".join(pieces)
    return b"".join(
        [
            added(index, **whole, arguments="", status="in_progress"),
            *(delta("function_call_arguments", index, piece) for piece in pieces),
            event("response.function_call_arguments.done", output_index=index, arguments=arguments),
            done(index, **whole, arguments=arguments, status="completed"),
        ]
    )


def says(*texts: str, usage: object = None) -> bytes:
    """A whole answer."""
    return created() + message(*texts) + ended(usage=usage)
