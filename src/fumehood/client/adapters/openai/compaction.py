"""Conversations that are longer than a context window; imports `api`, `config`, `errors` and `runtime`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fumehood.client.adapters.openai.api import ResponsesApi
from fumehood.client.adapters.openai.config import CompactionConfig
from fumehood.client.adapters.openai.wire import normalize_input_messages
from fumehood.client.deadlines import Deadline
from fumehood.client.errors import CompactionError
from fumehood.client.runtime.session import SessionProtocol

if TYPE_CHECKING:
    from openai import OpenAI


@dataclass(frozen=True)
class CompactionState:
    """What a session knows of its compactions.

    encrypted_items: the whole window that the last one returned, not only what is encrypted in it; it goes before
    everything that came later.
    """

    encrypted_items: tuple[Mapping[str, Any], ...] = ()
    last_compaction_tokens: int = 0
    compaction_count: int = 0


@dataclass(frozen=True)
class Transcript:
    """The items of a session's conversation since its last compaction."""

    items: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class ModelUsed:
    """The model that a session was last evaluated with."""

    model: str


class CompactionManager:
    """Compacts the conversation of a session, and keeps the result there.

    model: the one that compacts; by default the one that the session was last evaluated with.
    """

    def __init__(
        self,
        client: "OpenAI",
        config: CompactionConfig,
        session: SessionProtocol,
        *,
        model: str | None = None,
        api: ResponsesApi | None = None,
    ) -> None:
        self._api = api or ResponsesApi(client)
        self._config = config
        self._session = session
        self._model = model
        self._tokens = 0

    @property
    def state(self) -> CompactionState:
        return self._session[CompactionState].latest() or CompactionState()

    def should_compact(self, current_tokens: int) -> bool:
        self._tokens = current_tokens
        return self._config.enabled and current_tokens > self._config.threshold_tokens

    def compact(
        self, messages: Sequence[Mapping[str, Any]], *, deadline: Deadline | None = None
    ) -> list[dict[str, Any]]:
        """The window that takes the place of these messages. Raises CompactionError, and then nothing has changed."""
        used = self._session[ModelUsed].latest()
        model = self._model or (used.model if used else None)
        if model is None:
            raise CompactionError(
                self._tokens, ValueError("no model is known: pass model=, or evaluate a prompt first")
            )
        window = normalize_input_messages(self.inject_encrypted_items(messages))
        try:
            response = self._api.compact({"model": model, "input": window}, deadline=deadline)
        except Exception as error:
            raise CompactionError(self._tokens, error) from error
        if not response.output:
            raise CompactionError(self._tokens, ValueError("the provider returned an empty window"))
        state = CompactionState(tuple(response.output), self._tokens, self.state.compaction_count + 1)
        self._session[CompactionState].seed(state)
        return response.output

    def inject_encrypted_items(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The last window and then the messages; unless they begin with it already."""
        window = [dict(item) for item in self.state.encrypted_items]
        given = [dict(message) for message in messages]
        return given if given[: len(window)] == window else [*window, *given]
