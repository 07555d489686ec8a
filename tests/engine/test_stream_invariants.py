"""What holds for every stream, whatever the model does."""

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from fumehood.protocol.model_turns import (
    AnyModelEvent,
    ModelCallArgumentsDelta,
    ModelCallStarted,
    ModelCitation,
    ModelMessageStarted,
    ModelPassthroughItem,
    ModelReasoningDelta,
    ModelReasoningEnded,
    ModelReasoningStarted,
    ModelReasoningSummaryDelta,
    ModelRefusalDelta,
    ModelTextDelta,
    ModelTurnEnded,
)
from fumehood.protocol.openai.api_errors import ModelUnreachable
from fumehood.protocol.openai.items import UrlCitationAnnotation
from fumehood.protocol.openai.responses import Usage
from fumehood.testing import ScriptedModel
from tests.support.echo_tool import EchoTool
from tests.support.engine_harness import EngineHarness
from tests.support.stream_checks import check_invariants

TOOLS = [
    {"type": "echo"},
    {"type": "function", "name": "f", "parameters": {"type": "object"}},
    {"type": "custom", "name": "c"},
]

words = st.text(max_size=8)
keys = st.integers(0, 3)
pieces = st.sampled_from(['{"input": "a', '\\n"', "}", "{}", " ", '"', '{"text": 1}', "\\u00e9"])

passed = Raw(b'{"type":"web_search_call","id":"ws_1"}')
source = UrlCitationAnnotation(url="https://a.example", title="A", start_index=0, end_index=1)
rarer: st.SearchStrategy[AnyModelEvent] = st.one_of(
    st.sampled_from(
        [
            ModelMessageStarted(),
            ModelMessageStarted("commentary"),
            ModelCitation(source),
            ModelReasoningStarted(),
            ModelReasoningEnded(),
            ModelReasoningEnded("sealed"),
            ModelPassthroughItem(passed),
            ModelPassthroughItem(passed, awaits_client=True),
        ]
    ),
    st.builds(ModelReasoningSummaryDelta, st.integers(0, 2), words),
)


@st.composite
def events(draw: st.DrawFn) -> list[AnyModelEvent]:
    """A turn of a server that may interleave everything, but starts a call before it writes to it."""
    drawn: list[AnyModelEvent] = []
    started: set[int] = set()
    for _ in range(draw(st.integers(0, 12))):
        kind = draw(st.integers(0, 7))
        if kind > 5:
            drawn.append(draw(rarer))
        elif kind <= 2:
            drawn.append(
                draw(st.sampled_from([ModelTextDelta, ModelRefusalDelta, ModelReasoningDelta]))(draw(words))
            )
        else:
            key = draw(keys)
            if key not in started:
                started.add(key)
                name = draw(st.sampled_from(["echo", "f", "c", "nobody"]))
                drawn.append(ModelCallStarted(key, f"call_{key}_{draw(st.integers(0, 999))}", name))
            drawn.append(ModelCallArgumentsDelta(key, draw(pieces)))
    return drawn


@st.composite
def turns(draw: st.DrawFn) -> list[object]:
    beats: list[object] = []
    drawn = draw(events())
    while drawn:
        size = draw(st.integers(1, len(drawn)))
        beats.append(drawn[:size])
        drawn = drawn[size:]
    ending = draw(st.sampled_from(["stop", "calls", "length", "content_filter", "error"]))
    if ending == "error":
        beats.append(ModelUnreachable("gone"))
    else:
        beats.append(ModelTurnEnded(ending, draw(st.none() | st.just(Usage(output_tokens=1)))))  # pyright: ignore[reportArgumentType]
    return beats


@given(
    st.lists(turns(), min_size=1, max_size=3),
    st.booleans(),
    st.none() | st.integers(1, 3),
    st.sampled_from([None, "none", "required"]),
    st.sampled_from([None, {"summary": "auto"}]),
    st.sampled_from([None, ["reasoning.encrypted_content"]]),
)
@settings(max_examples=300, deadline=None)
async def test_every_stream_adds_up(
    script: list[list[object]],
    parallel: bool,
    most: int | None,
    choice: str | None,
    reasoning: object,
    include: list[str] | None,
) -> None:
    # Whatever comes after the script is an answer.
    model = ScriptedModel(*script, *([ModelTextDelta("end")] for _ in range(8)))  # pyright: ignore[reportArgumentType]
    engine = EngineHarness(model, [EchoTool()])
    streamed = await engine.stream(
        tools=TOOLS,
        parallel_tool_calls=parallel,
        max_tool_calls=most,
        tool_choice=choice,
        reasoning=reasoning,
        include=include,
    )
    response = check_invariants(streamed)
    assert await engine.store.get_response("", response.id) == response
    hosted = [item for item in response.output if type(item).__name__ == "CodeInterpreterCall"]
    assert most is None or len(hosted) <= most
