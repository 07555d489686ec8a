"""Which trace headers are read, and which are ignored."""

import json
from contextvars import copy_context

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, get_current_span

from fumehood.protocol.openai.responses import CreateResponse
from fumehood.telemetry.trace_context import TraceContextPropagator, get_caller_context

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
ON = TraceContextPropagator({})


def extract_with_headers(
    *headers: tuple[str, str], propagation: TraceContextPropagator = ON
) -> SpanContext | None:
    """What an application finds that is asked with these headers."""
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]

    def enter() -> SpanContext | None:
        propagation.enter_request(raw)
        return span_context(get_caller_context())

    return copy_context().run(enter)


def span_context(context: Context) -> SpanContext | None:
    found = get_current_span(context).get_span_context()
    return found if found.is_valid else None


def extract_tracestate(*values: str) -> str:
    found = extract_with_headers(("traceparent", PARENT), *(("tracestate", value) for value in values))
    assert found is not None
    return found.trace_state.to_header()


@pytest.mark.parametrize(
    "parent",
    [
        PARENT,
        f" \t{PARENT}\t ",
        f"00-{TRACE}-{SPAN}-ff",
        f"01-{TRACE}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01-a-later-version",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_a_parent_is_read(parent: str) -> None:
    found = extract_with_headers(("host", "localhost"), ("traceparent", parent))
    assert found is not None
    assert (f"{found.trace_id:032x}", f"{found.span_id:016x}") == (TRACE, SPAN)
    assert found.is_remote
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
        f"00-{TRACE}-{SPAN}-0é",
        f"{PARENT},{PARENT}",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 512}",
    ],
)
def test_malformed_parents_are_ignored(parent: str) -> None:
    assert extract_with_headers(("traceparent", parent), ("tracestate", "a=b")) is None


def test_a_repeated_traceparent_is_ignored() -> None:
    assert extract_with_headers(("traceparent", PARENT), ("traceparent", PARENT)) is None


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
        ([",".join(f"k{n}={'v' * 256}" for n in range(32))], ""),
    ],
)
def test_a_tracestate_is_read_whole_or_not_at_all_and_not_logged(
    values: list[str], read: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert extract_tracestate(*values) == read
    assert caplog.text == ""


@given(
    st.lists(st.tuples(st.sampled_from(["traceparent", "tracestate"]), st.text("0f-=,a \t@é\n")), max_size=4)
)
def test_any_header_is_read_or_ignored(headers: list[tuple[str, str]]) -> None:
    found = extract_with_headers(*headers)
    assert found is None or found.trace_state.to_header().isascii()


async def test_a_request_does_not_inherit_the_trace_of_the_previous_one() -> None:
    ON.enter_request([(b"traceparent", PARENT.encode())])
    assert span_context(get_caller_context()) is not None
    ON.enter_request([])
    assert span_context(get_caller_context()) is None


@pytest.mark.parametrize("names", ["none", "baggage", "b3, jaeger"])
def test_trace_context_can_be_disabled(names: str) -> None:
    off = TraceContextPropagator({"OTEL_PROPAGATORS": names})
    assert extract_with_headers(("traceparent", PARENT), propagation=off) is None
    assert span_context(off.extract_parent(request({"ws_request_header_traceparent": PARENT}))) is None


@pytest.mark.parametrize("names", ["", "tracecontext", "baggage, tracecontext"])
def test_trace_context_may_be_named_in_the_propagators(names: str) -> None:
    assert (
        extract_with_headers(
            ("traceparent", PARENT), propagation=TraceContextPropagator({"OTEL_PROPAGATORS": names})
        )
        is not None
    )


def request(metadata: object) -> CreateResponse:
    return msgspec.json.decode(json.dumps({"client_metadata": metadata}), type=CreateResponse)


def test_a_websocket_message_may_name_its_parent() -> None:
    attributes = {"ws_request_header_traceparent": PARENT, "ws_request_header_tracestate": "a=1", "more": [1]}
    found = span_context(ON.extract_parent(request(attributes)))
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
def test_other_metadata_is_ignored(metadata: object) -> None:
    assert span_context(ON.extract_parent(request(metadata))) is None
