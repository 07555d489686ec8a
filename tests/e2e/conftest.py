"""One gateway with real sandboxes before a scripted model, for all tests that do not kill it; imports the support."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI

from tests.support import served
from tests.support.sandboxes import has_cgroups
from tests.support.served import Model, Served


@dataclass(frozen=True)
class House:
    served: Served
    model: Model

    @property
    def strict(self) -> OpenAI:
        """A client that refuses whatever its own types do not know."""
        return OpenAI(
            base_url=self.served.url, api_key="none", max_retries=0, _strict_response_validation=True
        )

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=self.served.url, api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    directory: Path = tmp_path_factory.mktemp("gateway")
    with Model() as model, served.serving(directory, settings_for(model)) as running:
        yield House(running, model)


def settings_for(model: Model, **interpreter: object) -> dict[str, object]:
    limits = "enforced" if has_cgroups() else "best-effort"
    return {
        "models": [{"match": "scripted*", "base_url": model.url}, {"match": "direct", "backend": "direct"}],
        "providers": {"code_interpreter": {"settings": {"sandbox_limits": limits, **interpreter}}},
    }
