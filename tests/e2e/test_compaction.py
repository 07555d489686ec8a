"""Long conversations over a socket with the OpenAI SDK: counted, compacted, continued; imports the support."""

from typing import Any

import pytest

from tests.e2e.conftest import House
from tests.support.thinking import Thinker

THRESHOLD = 2000
MANAGED: Any = [{"type": "compaction", "compact_threshold": THRESHOLD}]
TURNS = 60
FACT = "Remember: the code word is heliotrope."
QUESTION = "Which word did I tell you first?"


def talk(number: int) -> str:
    return FACT if number == 0 else f"{number}. " + "something else entirely " * 12


@pytest.fixture
def thinker(house: House) -> Thinker:
    thinker = Thinker()
    house.model.script(*[thinker.answer] * 400)
    return thinker


def test_sixty_turns_by_previous_response_id(house: House, thinker: Thinker) -> None:
    previous: str | None = None
    sizes: list[int] = []
    for number in range(TURNS):
        response = house.strict.responses.create(
            model="scripted", input=talk(number), previous_response_id=previous, context_management=MANAGED
        )
        previous = response.id
        sizes.append(sum(len(item.model_dump_json()) for item in response.output))
    last = house.strict.responses.create(
        model="scripted", input=QUESTION, previous_response_id=previous, context_management=MANAGED
    )
    assert last.output_text == "heliotrope"
    assert max(thinker.turns) <= THRESHOLD
    assert 2 <= len(thinker.summaries) <= TURNS // 4
    assert max(sizes) < 20_000


def test_sixty_turns_by_giving_everything_back(house: House, thinker: Thinker) -> None:
    window: list[Any] = []
    for number in range(TURNS):
        window.append({"role": "user", "content": talk(number)})
        response = house.strict.responses.create(
            model="scripted", input=window, store=False, context_management=MANAGED
        )
        window += [item.model_dump(exclude_none=True) for item in response.output]
        compactions = [place for place, item in enumerate(window) if item.get("type") == "compaction"]
        if compactions and number % 2:
            window = window[compactions[-1] :]
    window.append({"role": "user", "content": QUESTION})
    last = house.strict.responses.create(model="scripted", input=window, store=False)
    assert last.output_text == "heliotrope"
    assert max(thinker.turns) <= THRESHOLD
    assert 2 <= len(thinker.summaries) <= TURNS // 4
