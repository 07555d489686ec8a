"""What is read from the headers of a trace, and what is not; imports `telemetry`, the SDK's API and hypothesis."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, get_current_span

from fumehood.protocol.responses import CreateResponse
from fumehood.serving.exchange import Receive, Scope, Send
from fumehood.telemetry.trace_context import Propagation, callers_trace

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
ON = Propagation({})


async def _unused(*_: Any) -> Any:
    raise AssertionError("nobody sends or receives here")


def seen(*headers: tuple[str, str], propagation: Propagation = ON) -> SpanContext | None:
    """What an application finds that is asked with these headers."""
    found: list[Context] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(callers_trace())

    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    asyncio.run(_asked(propagation.at_the_edge(app), raw))
    return span_context(found[0])


async def _asked(app: Any, headers: Sequence[tuple[bytes, bytes]]) -> None:
    await app({"type": "http", "headers": headers}, _unused, _unused)


def span_context(context: Context) -> SpanContext | None:
    found = get_current_span(context).get_span_context()
    return found if found.is_valid else None


def state(*values: str) -> str:
    found = seen(("traceparent", PARENT), *(("tracestate", value) for value in values))
    assert found is not None
    return found.trace_state.to_header()


@pytest.mark.parametrize(
    "parent",
    [
        PARENT,
        f" \t{PARENT}\t ",
        f"00-{TRACE}-{SPAN}-ff",
        f"01-{TRACE}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01-what-the-future-will-bring",
    ],
)
def test_a_parent_is_read(parent: str) -> None:
    found = seen(("host", "localhost"), ("traceparent", parent))
    assert found is not None
    assert (f"{found.trace_id:032x}", f"{found.span_id:016x}") == (TRACE, SPAN)
    assert found.is_remote
    assert found.trace_flags & ~3 == 0
    assert found.trace_flags.sampled


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"01-{TRACE}-{SPAN}-01.more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE}-{SPAN}-0é",
        f"{PARENT},{PARENT}",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 512}",
    ],
)
def test_what_is_no_parent_is_none(parent: str) -> None:
    assert seen(("traceparent", parent), ("tracestate", "a=b")) is None


def test_two_parents_are_none() -> None:
    assert seen(("traceparent", PARENT), ("traceparent", PARENT)) is None


@pytest.mark.parametrize(
    ("values", "read"),
    [
        (["a=1"], "a=1"),
        (["a=1,b=2", "c@d=3"], "a=1,b=2,c@d=3"),
        ([" a=1 ,\t, b=x y"], "a=1,b=x y"),
        ([",".join(f"k{n}=1" for n in range(32))], ",".join(f"k{n}=1" for n in range(32))),
        ([",".join(f"k{n}=1" for n in range(33))], ""),
        (["a=1", "a=2"], ""),
        (["a=1,b"], ""),
        (["a=1=2"], ""),
        (["A=1"], ""),
        (["a=1\n"], ""),
        (["a=é"], ""),
        ([f"{'k' * 257}=1"], ""),
        ([f"a={'v' * 256},b={'v' * 250}"], f"a={'v' * 256},b={'v' * 250}"),
        ([f"a={'v' * 256},b={'v' * 254}"], ""),
    ],
)
def test_a_state_is_read_whole_or_not_at_all(values: list[str], read: str) -> None:
    assert state(*values) == read


@given(
    st.lists(st.tuples(st.sampled_from(["traceparent", "tracestate"]), st.text("0f-=,a \t@é\n")), max_size=4)
)
def test_nothing_that_is_sent_breaks_it(headers: list[tuple[str, str]]) -> None:
    found = seen(*headers)
    assert found is None or found.trace_state.to_header().isascii()


async def test_a_request_does_not_inherit_the_trace_of_the_one_before() -> None:
    found: list[SpanContext | None] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(span_context(callers_trace()))

    edge = ON.at_the_edge(app)
    await _asked(edge, [(b"traceparent", PARENT.encode())])
    await _asked(edge, [])
    assert found[0] is not None
    assert found[1] is None


@pytest.mark.parametrize("names", ["none", "baggage", "b3, jaeger"])
def test_an_operator_may_want_no_traces_of_others(names: str) -> None:
    off = Propagation({"OTEL_PROPAGATORS": names})
    assert seen(("traceparent", PARENT), propagation=off) is None
    assert span_context(off.parent_of(request({"ws_request_header_traceparent": PARENT}))) is None


@pytest.mark.parametrize("names", ["", "tracecontext", "baggage, tracecontext"])
def test_an_operator_may_name_what_is_usual(names: str) -> None:
    assert seen(("traceparent", PARENT), propagation=Propagation({"OTEL_PROPAGATORS": names})) is not None


def request(metadata: object) -> CreateResponse:
    return msgspec.json.decode(json.dumps({"client_metadata": metadata}), type=CreateResponse)


def test_a_message_may_say_it_itself() -> None:
    told = {"ws_request_header_traceparent": PARENT, "ws_request_header_tracestate": "a=1", "more": [1]}
    found = span_context(ON.parent_of(request(told)))
    assert found is not None
    assert (f"{found.trace_id:032x}", found.trace_state.to_header()) == (TRACE, "a=1")


@pytest.mark.parametrize(
    "metadata",
    [
        *(None, 1, "x", [], {}, {"ws_request_header_traceparent": None}),
        {"ws_request_header_traceparent": PARENT + "\r\nx: y"},
        {"ws_request_header_traceparent": PARENT, "ws_request_header_tracestate": 1},
        {"ws_request_header_tracestate": "a=1"},
    ],
)
def test_a_message_that_says_something_else_is_no_mistake(metadata: object) -> None:
    assert span_context(ON.parent_of(request(metadata))) is None
