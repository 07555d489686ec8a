"""One gateway with real sandboxes before a scripted model, for all tests that do not kill it; imports the support."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from openai import OpenAI

from tests.support import served
from tests.support.sandboxes import has_cgroups
from tests.support.served import Model, Served


@dataclass(frozen=True)
class House:
    """strict: a client that refuses whatever its own types do not know; client: one as most people have."""

    served: Served
    model: Model
    strict: OpenAI
    client: OpenAI


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    directory = tmp_path_factory.mktemp("gateway")
    with (
        Model() as model,
        served.serving(directory, settings_for(model)) as running,
        client_of(running, strict=True) as strict,
        client_of(running) as client,
    ):
        yield House(running, model, strict, client)


def client_of(running: Served, *, strict: bool = False) -> OpenAI:
    return OpenAI(
        base_url=running.url,
        api_key="none",
        max_retries=0,
        timeout=60,
        _strict_response_validation=strict,
    )


def settings_for(model: Model, **interpreter: object) -> dict[str, object]:
    limits = "enforced" if has_cgroups() else "best-effort"
    return {
        "models": [{"match": "scripted*", "base_url": model.url}, {"match": "direct", "backend": "direct"}],
        "providers": {"code_interpreter": {"settings": {"sandbox_limits": limits, **interpreter}}},
    }


def settings_without_code(model: Model) -> dict[str, object]:
    """For what needs no sandboxes: the gateway starts much faster."""
    return {**settings_for(model), "providers": {"code_interpreter": {"enabled": False}}}
