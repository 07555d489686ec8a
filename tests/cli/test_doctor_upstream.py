"""`fumehood doctor --upstream` on model servers of several kinds."""

import json
from collections.abc import Iterator

import pytest

from tests.support.cli_runner import run_command
from tests.support.small_model_server import KEY, SmallModelServer, run_small_model_server


@pytest.fixture(scope="module")
def server() -> Iterator[SmallModelServer]:
    with run_small_model_server(flavor="vllm") as server:
        yield server


def test_a_good_server(server: SmallModelServer) -> None:
    result = run_command("doctor", "--upstream", server.url, "--api-key-env", "K", K=KEY)
    assert result.code == 0, result
    lines = [line.split() for line in result.out.splitlines() if line.startswith("ok")]
    assert [line[1] for line in lines] == ["reachable", "models", "tool", "context", "vision"]
    assert result.out.endswith(f"The model server can be used ({server.url}).")
    assert KEY not in result.out


def test_json(server: SmallModelServer) -> None:
    arguments = ("doctor", "--upstream", server.url, "--api-key-env", "K", "--model", "nobody", "--json")
    result = run_command(*arguments, K=KEY)
    report = json.loads(result.out)
    assert result.code == 1
    assert (report["is_usable"], report["model"], report["base_url"]) == (False, "nobody", server.url)
    states = {finding["name"]: finding["state"] for finding in report["findings"]}
    assert (states["models"], states["tool call"]) == ("warning", "missing")


def test_a_server_that_wants_a_key(server: SmallModelServer) -> None:
    result = run_command("doctor", "--upstream", server.url)
    assert result.code == 1
    assert "--api-key-env NAME" in result.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--upstream", "nonsense"), "is not the URL of a server"),
        (("--upstream", "http://h/v1", "--api-key-env", "UNSET_VARIABLE"), "UNSET_VARIABLE is not set"),
        (("--upstream", "http://h/v1", "--data", "."), "excludes --data"),
        (("--model", "m"), "requires --upstream"),
        (("--api-key-env", "K"), "requires --upstream"),
    ],
)
def test_invalid_options(arguments: tuple[str, ...], words: str) -> None:
    result = run_command("doctor", *arguments)
    assert result.code == 2
    assert words in result.error_text
