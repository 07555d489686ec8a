"""One gateway with real sandboxes before a scripted model, for the client's tests; imports the support."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from openai import OpenAI

from fumehood.client.adapters.openai import OpenAIAdapter
from tests.e2e.conftest import client_of, settings_for
from tests.support import served
from tests.support.served import Model, Served


@dataclass(frozen=True)
class House:
    """A gateway, the model behind it, and the SDK in front of it."""

    served: Served
    model: Model
    client: OpenAI

    def adapter(self, **settings: object) -> OpenAIAdapter:
        made: dict[str, object] = {"model": "scripted", "client": self.client, **settings}
        return OpenAIAdapter(**made)  # pyright: ignore[reportArgumentType] - tests say what they want


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with (
        Model() as model,
        served.serving(tmp_path_factory.mktemp("gateway"), settings_for(model)) as running,
        client_of(running) as client,
    ):
        yield House(running, model, client)
