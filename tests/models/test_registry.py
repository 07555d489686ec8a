"""Models by name."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from fumehood.gateway_stats import ModelStats
from fumehood.models.model_settings import ModelSettings
from fumehood.models.registry import ModelRegistry, ModelRoute, open_model_registry
from fumehood.protocol.model_turns import ModelCard, ModelRequest, ModelTextDelta
from fumehood.protocol.openai.api_errors import InvalidRequest, ModelUnreachable
from fumehood.protocol.openai.passthrough_fields import SAMPLING_FIELDS, reserved_fields
from fumehood.testing import ScriptedModel
from fumehood.testing.fakes.fake_clock import FakeClock
from tests.support import raw_model_server
from tests.support.conversations import message, segment
from tests.support.raw_model_server import stream

ROOT = Path(__file__).resolve().parents[2]


class FakeModelLister:
    """A server's list of models."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.calls = 0
        self.error: Exception | None = None
        self.pause: asyncio.Event | None = None

    async def list_models(self) -> Sequence[ModelCard]:
        self.calls += 1
        if self.pause is not None:
            await self.pause.wait()
        if self.error is not None:
            raise self.error
        return [ModelCard(id=name, created=1, owned_by="them") for name in self.names]


async def names(registry: ModelRegistry) -> list[str]:
    return [card.id for card in await registry.list_models()]


async def test_the_first_match_wins() -> None:
    a, b, c = ScriptedModel(), ScriptedModel(), ScriptedModel()
    registry = ModelRegistry(
        [ModelRoute("gpt-4o", a), ModelRoute("gpt-*", b), ModelRoute("[ab]?", c)], FakeClock()
    )
    assert registry.get_backend("gpt-4o") is a
    assert registry.get_backend("gpt-4o-mini") is b
    assert registry.get_backend("a1") is c
    for unknown in ("GPT-4o", "c1", "claude", ""):
        with pytest.raises(InvalidRequest) as caught:
            registry.get_backend(unknown)
        assert (caught.value.wire_code, caught.value.param) == ("model_not_found", "model")


async def test_cards() -> None:
    clock = FakeClock(now=1000.0)
    routes = [
        ModelRoute("fast", ScriptedModel(), name="fast"),
        ModelRoute(
            "gpt-*",
            ScriptedModel(),
            list_models=FakeModelLister("gpt-1", "other", "gpt-2", "gpt-1").list_models,
        ),
        ModelRoute("*", ScriptedModel(), list_models=FakeModelLister("fast", "gpt-3", "llama").list_models),
    ]
    registry = ModelRegistry(routes, clock)
    assert await names(registry) == ["fast", "gpt-1", "gpt-2", "llama"]
    assert (await registry.list_models())[0] == ModelCard(id="fast", created=1000, owned_by="fumehood")


async def test_the_model_list_is_cached_for_a_minute() -> None:
    clock, lister = FakeClock(), FakeModelLister("a")
    registry = ModelRegistry([ModelRoute("*", ScriptedModel(), list_models=lister.list_models)], clock)
    assert await asyncio.gather(names(registry), names(registry)) == [["a"], ["a"]]
    lister.names = ("b",)
    clock.advance(59)
    assert await names(registry) == ["a"]
    clock.advance(1)
    assert await names(registry) == ["b"]
    assert lister.calls == 2


async def test_a_failed_listing_falls_back_on_the_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fumehood.models.registry._MODEL_LIST_TIMEOUT", 0.01)
    clock, lister = FakeClock(), FakeModelLister("a")
    registry = ModelRegistry([ModelRoute("*", ScriptedModel(), list_models=lister.list_models)], clock)
    lister.error = ModelUnreachable("down")
    assert await names(registry) == []
    assert "Cannot list the models of '*': down" in caplog.text
    clock.advance(60)
    lister.error = None
    assert await names(registry) == ["a"]
    clock.advance(60)
    lister.pause = asyncio.Event()
    assert await names(registry) == ["a"], "what it said last"
    assert lister.calls == 3


async def test_without_settings_direct_serves_every_name() -> None:
    stats: dict[str, ModelStats] = {}
    registry = open_model_registry([], FakeClock(), stats=stats)
    [_ async for _ in registry.get_backend("gpt-4o").stream(ModelRequest(model="gpt-4o"))]
    assert {match: dict(counted.ended_turns) for match, counted in stats.items()} == {"*": {"ended": 1}}
    assert await names(registry) == ["direct"]
    await registry.close()


async def test_from_settings() -> None:
    listed = {"data": [{"id": "llama"}, {"id": "special"}]}
    answers = [
        raw_model_server.error("503 Service Unavailable", {}, headers={"Retry-After": "0"}),
        stream(raw_model_server.says("a")),
        raw_model_server.error("200 OK", listed),
    ]
    async with raw_model_server.open_raw_model_server(*answers) as server:
        settings = [
            ModelSettings(match="direct", backend="direct"),
            ModelSettings(
                match="special", base_url=server.url, name="org/special", api_key_env="KEY", retries=1
            ),
            ModelSettings(match="old-*", base_url=server.url, name="org/special", retries=0),
            ModelSettings(match="*", base_url=server.url + "/"),
        ]
        clock = FakeClock()
        registry = open_model_registry(settings, clock, {"KEY": "sk-1"})
        request = ModelRequest(model="special", segments=[segment(message("hi"))])
        batches = registry.get_backend("special").stream(request)
        first = asyncio.ensure_future(anext(batches))
        while not first.done():  # it waits before it asks again
            clock.advance(1)
            await asyncio.sleep(0.001)
        assert (await first)[0] == ModelTextDelta("a")
        await batches.aclose()
        assert {received.json["model"] for received in server.requests} == {"org/special"}
        assert {received.headers["authorization"] for received in server.requests} == {"Bearer sk-1"}
        assert await names(registry) == ["direct", "special", "llama"]
        assert server.requests[-1].path == "/v1/models"
        assert "authorization" not in server.requests[-1].headers
        assert server.connections == 1
        await registry.close()


def test_settings_from_a_file() -> None:
    values = {
        "match": "gpt-*",
        "base_url": "https://api.example/v1",
        "headers": {"x-a": "b"},
        "extra_body": {"top_k": 5, "nested": {"a": [1, None]}},
        "read_timeout": 60,
    }
    settings = msgspec.convert(values, ModelSettings)
    assert settings.is_pattern
    assert (settings.retries, settings.max_tokens_field, settings.read_timeout) == (2, "max_tokens", 60.0)
    assert "x-a" not in repr(settings)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "base_url is missing"),
        ({"base_url": "ftp://x"}, "is not the URL of a server"),
        ({"base_url": "http://x/v1?k=1"}, "is not the URL of a server"),
        ({"base_url": "http://user:pw@x/v1"}, "put the secret into an environment variable"),
        ({"base_url": "http://x:y/v1"}, "is not the URL of a server"),
        ({"base_url": "http://x", "headers": {"a b": "c"}}, "'a b' is not a valid header"),
        ({"base_url": "http://x", "headers": {"a": "c\nd: e"}}, "'a' is not a valid header"),
        ({"base_url": "http://x", "extra_body": {"messages": []}}, "cannot set `messages`"),
        (
            {"base_url": "http://x", "backend": "responses", "extra_body": {"store": True}},
            "cannot set `store`",
        ),
        ({"base_url": "http://x", "pass_tools": ["*"]}, "with the backend `responses` only"),
        ({"base_url": "http://x", "retries": 11}, "<= 10"),
        ({"base_url": "http://x", "read_timeout": 0}, "> 0"),
        ({"base_url": "http://x", "modle": "y"}, "modle"),
        ({"backend": "direct", "base_url": "http://x"}, "has no server"),
        ({"backend": "direct", "pass_fields": ["a"]}, "has no server"),
        ({"base_url": "http://x", "pass_fields": ["a b"]}, "not a field name"),
        ({"base_url": "http://x", "pass_fields": [""]}, "not a field name"),
        ({"base_url": "http://x", "pass_fields": ["a"] * 101}, "length <= 100"),
        *(
            (
                {"base_url": "http://x", "backend": backend, "pass_fields": ["fine", name]},
                f"cannot contain `{name}`",
            )
            for backend in ("chat_completions", "responses")
            for name in (
                *(
                    "n",
                    "model",
                    "messages",
                    "input",
                    "stream",
                    "stream_options",
                    "tools",
                    "tool_choice",
                    "store",
                ),
                *(
                    "max_tokens",
                    "max_completion_tokens",
                    "response_format",
                    "logprobs",
                    "temperature",
                    "include",
                ),
                *("best_of", "logits_processors", "previous_response_id", "reasoning", "reasoning_effort"),
            )
        ),
    ],
)
def test_invalid_settings(values: dict[str, object], expected: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=expected) as caught:
        msgspec.convert(values, ModelSettings)
    assert "pw" not in str(caught.value).replace("password", "")


def test_fields_that_are_passed_on() -> None:
    """They are documented, and none of them is one that the gateway decides about."""
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    section = page.partition("### Fields for the model server")[2].partition("**Turns.**")[0]
    assert [name for name in SAMPLING_FIELDS if f"`{name}`" not in section] == []
    assert not reserved_fields() & set(SAMPLING_FIELDS)
    assert len(set(SAMPLING_FIELDS)) == len(SAMPLING_FIELDS)


def test_keys() -> None:
    settings = ModelSettings(base_url="http://x", api_key_env="KEY")
    key = settings.read_api_key({"KEY": " sk-1\n"})
    assert key is not None
    assert key.reveal() == "sk-1"
    assert "sk-1" not in repr(key) + str(key) + f"{key}"
    assert ModelSettings(base_url="http://x").read_api_key({"KEY": "sk-1"}) is None
    for environment in ({}, {"KEY": ""}):
        with pytest.raises(ValueError, match="the environment variable KEY for the models '\\*' is not set"):
            settings.read_api_key(environment)
    with pytest.raises(ValueError, match="does not hold a key") as caught:
        settings.read_api_key({"KEY": "sk-1\nx: y"})
    assert "sk-1" not in str(caught.value)
