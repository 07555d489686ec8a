"""The oldest version of OpenAI's SDK that the client supports."""

import inspect
import os
import re
import tomllib
from pathlib import Path

import openai
from openai import OpenAI

ROOT = Path(__file__).resolve().parents[2]


def test_the_extra_requires_the_version_that_is_tested() -> None:
    """`make test-openai-floor` sets the variable; otherwise the version of the lock file runs."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (floor,) = [found[1] for one in extras["openai"] if (found := re.fullmatch(r"openai>=([\d.]+)", one))]
    tested = os.environ.get("FUMEHOOD_OPENAI_FLOOR", floor)
    assert tested == floor
    running, wanted = (tuple(map(int, re.findall(r"\d+", one))) for one in (openai.__version__, floor))
    if "FUMEHOOD_OPENAI_FLOOR" in os.environ:
        assert running[: len(wanted)] == wanted
    else:
        assert running >= wanted
    assert "make test-openai-floor" in (ROOT / ".ci/run").read_text()


def test_the_sdk_has_what_the_client_calls() -> None:
    with OpenAI(api_key="k") as client:
        assert callable(client.containers.create)
        assert callable(client.containers.files.content.with_streaming_response.retrieve)
        assert callable(client.responses.with_raw_response.create)
        assert callable(client.responses.with_raw_response.compact)
        assert callable(client.responses.input_tokens.with_raw_response.count)
        assert "memory_limit" in inspect.signature(client.containers.create).parameters
