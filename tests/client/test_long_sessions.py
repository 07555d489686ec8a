"""Two hundred evaluations in one session: the context stays bounded, nothing is lost."""

from pathlib import Path
from typing import Any

import pytest

from fumehood.client import HostMount, MarkdownSection, Prompt, PromptSection, Session, ToolInvoked
from fumehood.client.adapters.openai import (
    CompactionConfig,
    CompactionState,
    OpenAIContainerWorkspaceSection,
    OpenAIHostedToolsConfig,
)
from tests.client.conftest import GatewayServer
from tests.support.long_conversations import (
    FACT,
    KNOWN,
    PRINTED,
    QUESTION,
    READ,
    WRITE,
    Analyst,
    ConversationRecord,
    count_tokens,
    make_text,
)

HOSTED = OpenAIHostedToolsConfig(code_interpreter=True)
MOUNTED = "RUN:print(open('data/mounted.txt').read()):END"


def create_prompt(text: str, *sections: PromptSection) -> Prompt[None]:
    turn = MarkdownSection(title="Turn", key="turn", template=text)
    return Prompt(ns="tests", key="talk", sections=[*sections, turn])


class LongSession:
    """A session of the client's, and what comes of it. sections: what every prompt has besides its text."""

    def __init__(self, gateway_server: GatewayServer, threshold: int, *, zdr_mode: bool) -> None:
        self.analyst = Analyst()
        self.record = ConversationRecord(threshold, turn=0)
        self.session = Session()
        self.sections: list[PromptSection] = []
        self.printed: list[str] = []
        self.overhead = 0  # tokens that the other sections have
        config = CompactionConfig(threshold_tokens=threshold, zdr_mode=zdr_mode)
        self._adapter = gateway_server.adapter(compaction=config, hosted_tools=HOSTED)
        self.session.bus.subscribe(ToolInvoked, self._on_tool_invoked)
        gateway_server.model.script(*[self.analyst.answer] * 1000)

    def _on_tool_invoked(self, event: ToolInvoked) -> None:
        result: Any = event.result.value
        self.printed.append(result.stdout)

    def say(self, number: int, text: str) -> str:
        response = self._adapter.evaluate(create_prompt(text, *self.sections), session=self.session)
        state = self.session[CompactionState].latest()
        if state is not None and state.compaction_count > len(self.record.compactions):
            self.record.compactions.append(number)
            self.record.sealed.append(sum(len(item["encrypted_content"]) for item in state.encrypted_items))
        asked = str(response.transcript[0]["content"])
        self.overhead = count_tokens(asked) - count_tokens(text)
        self.record.turn = max(self.record.turn, count_tokens(asked) + count_tokens(response.text or "") + 8)
        return response.text or ""


def converse(
    gateway_server: GatewayServer, threshold: int, turns: int, *, zdr_mode: bool, mount: Path | None
) -> None:
    long = LongSession(gateway_server, threshold, zdr_mode=zdr_mode)
    if mount is None:
        _converse(long, threshold, turns, mounted=False)
        return
    (mount / "mounted.txt").write_text("granite")
    workspace = OpenAIContainerWorkspaceSection(
        session=long.session, mounts=[HostMount(str(mount), "data")], allowed_host_roots=[str(mount)]
    )
    long.sections.append(workspace)
    try:
        _converse(long, threshold, turns, mounted=True)
    finally:
        workspace.cleanup()


def _converse(long: LongSession, threshold: int, turns: int, *, mounted: bool) -> None:
    # The first turn is kept word for word; what only later turns say is in summaries of summaries.
    long.say(0, make_text(threshold // 20, WRITE))
    long.say(1, make_text(threshold // 20 - long.overhead, FACT))
    for number in range(2, turns - 3):
        long.say(number, make_text(threshold // 20 - long.overhead, f"{number}."))
    long.say(turns - 3, READ)
    if mounted:
        long.say(turns - 2, MOUNTED)
    assert long.printed[1:] == [PRINTED, *(["granite\n"] if mounted else [])]
    assert long.say(turns - 1, QUESTION) == KNOWN
    long.record.check(long.analyst, turns)
    (state,) = long.session[CompactionState].all()
    assert state.last_compaction_tokens > threshold


CASES = [
    pytest.param(
        zdr_mode, mounted, id=f"{'zdr' if zdr_mode else 'stored'}-{'workspace' if mounted else 'auto'}"
    )
    for zdr_mode in (False, True)
    for mounted in (False, True)
]


@pytest.mark.parametrize(("zdr_mode", "mounted"), CASES)
def test_fifty_evaluations_stay_within_the_threshold(
    gateway_server: GatewayServer, tmp_path: Path, zdr_mode: bool, mounted: bool
) -> None:
    converse(gateway_server, 2000, 50, zdr_mode=zdr_mode, mount=tmp_path if mounted else None)


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [2000, 5000, 100_000])
@pytest.mark.parametrize(("zdr_mode", "mounted"), CASES)
def test_two_hundred_evaluations_stay_within_the_threshold(
    gateway_server: GatewayServer, tmp_path: Path, zdr_mode: bool, mounted: bool, threshold: int
) -> None:
    converse(gateway_server, threshold, 200, zdr_mode=zdr_mode, mount=tmp_path if mounted else None)
