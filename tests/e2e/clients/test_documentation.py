"""What docs/clients.md shows works as it stands, but for the address and the model's name."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import RunningGateway
from tests.support import client_conversation, npm

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "clients.md").read_text()
ADDRESS = "http://127.0.0.1:8080/v1"
# Title of the section, language, code.
EXAMPLES = [
    (title, *example)
    for title, section in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    for example in re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
]


def examples(language: str) -> list[str]:
    return [code for _, kind, code in EXAMPLES if kind == language]


def check(gateway: RunningGateway, codes: list[str], run: Callable[[], str]) -> None:
    """Every one of them has the conversation."""
    gateway.model.script(*client_conversation.turns(1) * len(codes))
    said = [line for line in run().splitlines() if line != f"squares.csv {client_conversation.FILE!r}"]
    assert said == [client_conversation.LINK, client_conversation.SUM] * len(codes)
    assert gateway.model.unused_answers == 0
    for place in range(0, 4 * len(codes), 4):
        client_conversation.check_asked(
            gateway.model.requests[place : place + 4], [client_conversation.SQUARED]
        )


def localize_example(gateway: RunningGateway, code: str) -> str:
    assert ADDRESS in code
    return code.replace(ADDRESS, gateway.process.url).replace("qwen3", "scripted")


@pytest.mark.slow
def test_python(gateway: RunningGateway) -> None:
    """All in one process, since what they import takes longer than what they do."""
    codes = examples("python")
    program = "\n".join(f"exec({localize_example(gateway, code)!r}, {{}})" for code in codes)

    def run() -> str:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    check(gateway, codes, run)


@pytest.mark.slow
@npm.needed
def test_javascript(gateway: RunningGateway) -> None:
    for code in examples("js"):
        options = ("--input-type=module", "--eval", localize_example(gateway, code))
        check(gateway, [code], lambda options=options: npm.node(*options, cwd=npm.HERE))


def test_every_client_is_there() -> None:
    assert [title for title, *_ in EXAMPLES] == [
        "OpenAI, Python",
        "OpenAI Agents SDK",
        "Pydantic AI",
        "LangChain",
        "OpenAI, Node.js",
        "AI SDK",
        "Codex",
    ]
    (settings,) = [code for _, kind, code in EXAMPLES if kind == "toml"]
    assert tomllib.loads(settings)["model_providers"]["fumehood"]["wire_api"] == "responses"


def test_versions_are_pinned_and_no_registry_is_named() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert all("==" in requirement for requirement in groups["clients"])
    wanted: dict[str, str] = json.loads((npm.HERE / "package.json").read_text())["dependencies"]
    assert all(re.fullmatch(r"(npm:\w+@)?\d+\.\d+\.\d+", version) for version in wanted.values())
    lock = (npm.HERE / "package-lock.json").read_text()
    assert '"resolved"' not in lock
    assert wanted.keys() <= json.loads(lock)["packages"][""]["dependencies"].keys()
