"""Clients that use chat completions and embeddings by default, against a gateway with a key."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import OpenAI
from pydantic import BaseModel, SecretStr

from tests.support import client_environment, gateway_process
from tests.support.gateway_process import GatewayProcess
from tests.support.small_model_server import KEY, SmallModelServer, run_small_model_server

HELLO = "You said: hello"
VECTORS = [[1.0, 0.5, -1.0], [3.0, 0.5, -1.0]]
CALLERS_KEY = "fh-" + "k" * 40


def in_other_environment[Test: Callable[..., None]](test: Test) -> Test:
    """For clients that cannot share an environment with the newest openai."""
    return pytest.mark.slow(client_environment.needed(test))


@dataclass(frozen=True)
class ChatGateway:
    process: GatewayProcess
    server: SmallModelServer

    @property
    def url(self) -> str:
        return self.process.url


@pytest.fixture(scope="module")
def chat_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatGateway]:
    with run_small_model_server() as server:
        settings = {
            "models": [{"match": "*", "base_url": server.url, "api_key_env": "SMALL_KEY"}],
            "providers": {"code_interpreter": {"enabled": False}},
        }
        directory = tmp_path_factory.mktemp("gateway")
        with gateway_process.run_gateway(directory, settings, {"SMALL_KEY": KEY}) as process:
            yield ChatGateway(process, server)
    assert all(CALLERS_KEY not in str(request.headers) for request in server.requests)


class Person(BaseModel):
    name: str
    age: int


@tool
def find(name: str) -> str:
    """Find somebody."""
    return name


def test_openai(chat_gateway: ChatGateway) -> None:
    plain = OpenAI(base_url=chat_gateway.url, api_key=CALLERS_KEY, max_retries=0)
    client = OpenAI(base_url=chat_gateway.url, api_key=CALLERS_KEY, _strict_response_validation=True)
    whole = client.chat.completions.create(
        model="small-chat", messages=[{"role": "user", "content": "hello"}]
    )
    assert whole.choices[0].message.content == HELLO
    with client.chat.completions.stream(
        model="small-chat", messages=[{"role": "user", "content": "hello"}]
    ) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_completion().choices[0].message.content == HELLO
    assert kinds.count("content.delta") > 2
    parsed = client.chat.completions.parse(
        model="small-chat", messages=[{"role": "user", "content": "hello"}], response_format=Person
    )
    assert parsed.choices[0].message.parsed == Person(name="Ann", age=42)
    vectors = plain.embeddings.create(model="small-embed", input=["a", "bcd"])
    assert [row.embedding for row in vectors.data] == VECTORS
    with pytest.raises(openai.BadRequestError, match="does not exist"):
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "hello"}])


def test_langchain(chat_gateway: ChatGateway) -> None:
    model: Any = ChatOpenAI(
        model="small-chat", base_url=chat_gateway.url, api_key=SecretStr(CALLERS_KEY), max_retries=0
    )
    answer = model.invoke("hello")
    assert answer.text == HELLO
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["total_tokens"] == 13
    pieces = [piece.text for piece in model.stream("hello")]
    assert len(pieces) > 3
    assert "".join(pieces) == HELLO
    (call,) = model.bind_tools([find]).invoke("hello").tool_calls
    assert (call["name"], call["args"]) == ("find", {"name": "Ann"})
    assert model.with_structured_output(Person).invoke("hello") == Person(name="Ann", age=42)


def test_langchain_embeddings(chat_gateway: ChatGateway) -> None:
    embeddings = OpenAIEmbeddings(
        model="small-embed",
        base_url=chat_gateway.url,
        api_key=SecretStr(CALLERS_KEY),
        check_embedding_ctx_length=False,  # by default it fetches a tokenizer of OpenAI's models
    )
    assert embeddings.embed_documents(["a", "bcd"]) == VECTORS
    assert embeddings.embed_query("a") == VECTORS[0]


@in_other_environment
def test_litellm(chat_gateway: ChatGateway) -> None:
    script = client_environment.HERE / "litellm_client.py"
    told = json.loads(client_environment.run("python", str(script), chat_gateway.url, CALLERS_KEY))
    assert (told["text"], told["streamed"], told["tokens"]) == (HELLO, HELLO, 13)
    assert told["pieces"] > 3
    assert told["call"] == ["find", {"name": "Ann"}]
    assert told["vectors"] == VECTORS
    assert "does not exist" in told["error"]


@in_other_environment
def test_dspy(chat_gateway: ChatGateway) -> None:
    script = client_environment.HERE / "dspy_client.py"
    told = json.loads(client_environment.run("python", str(script), chat_gateway.url, CALLERS_KEY))
    assert told["plain"] == [HELLO]
    assert (told["answer"], told["count"], told["reasoning"]) == ("42", 42, "42")
    assert told["vectors"] == VECTORS


@in_other_environment
def test_instructor(chat_gateway: ChatGateway) -> None:
    script = client_environment.HERE / "instructor_client.py"
    told = json.loads(client_environment.run("python", str(script), chat_gateway.url, CALLERS_KEY))
    ann = {"name": "Ann", "age": 42}
    assert told == {"tools": ann, "streamed": ann, "schema": ann}


@in_other_environment
def test_llm(chat_gateway: ChatGateway, tmp_path: Path) -> None:
    entry = {
        "model_id": "small",
        "model_name": "small-chat",
        "api_base": chat_gateway.url,
        "api_key_name": "gateway",
    }
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))  # JSON is YAML
    (tmp_path / "keys.json").write_text(json.dumps({"gateway": CALLERS_KEY}))
    environment = {"LLM_USER_PATH": str(tmp_path)}
    for options in ((), ("--no-stream",)):
        said = client_environment.run("llm", "-m", "small", *options, "hello", environment=environment)
        assert said.strip() == HELLO
    streamed = [bool(request.body.get("stream")) for request in chat_gateway.server.requests[-2:]]
    assert streamed == [True, False]
