"""Compaction of conversations that outgrow the context window."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from fumehood.client.adapters.openai.config import CompactionConfig, check_client
from fumehood.client.adapters.openai.responses_client import ResponsesClient
from fumehood.client.adapters.openai.wire import normalize_input_messages
from fumehood.client.deadlines import Deadline
from fumehood.client.errors import CompactionError
from fumehood.client.runtime.blocking_shell import BlockingShell
from fumehood.client.runtime.operations import Steps
from fumehood.client.runtime.session import ConversationState, SessionProtocol
from fumehood.client.type_validation import check_arguments

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


_CHARACTERS_PER_TOKEN = 4
_IMAGE_CHARACTERS = 800 * _CHARACTERS_PER_TOKEN
_MAX_FILE_CHARACTERS = 100_000  # a model reads no more of a file
_UNCOUNTED_FIELDS = frozenset({"id", "type", "role", "status", "call_id", "encrypted_content"})


@dataclass(frozen=True)
class CompactionState(ConversationState):
    """The compaction state of a session.

    encrypted_items: the whole window that the last compaction returned, not only its encrypted items; it precedes
    everything later.
    """

    encrypted_items: tuple[Mapping[str, Any], ...] = ()
    last_compaction_tokens: int = 0
    compaction_count: int = 0


@dataclass(frozen=True)
class Transcript(ConversationState):
    """The items of a session's conversation since its last compaction."""

    items: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class LastModel(ConversationState):
    """The model that a session was last evaluated with."""

    model: str


def estimate_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
    """Estimate the tokens of messages: one for every four characters, and 800 for an image. Of a file, the first
    100,000 characters count.
    """
    return sum(_count_characters(dict(message)) for message in messages) // _CHARACTERS_PER_TOKEN


def _count_characters(value: Any, name: str = "") -> int:
    match value:
        case str() if name == "image_url":
            return _IMAGE_CHARACTERS
        case str() if name == "file_data":  # base64
            return min(len(value) * 3 // 4, _MAX_FILE_CHARACTERS)
        case str():
            return 0 if name in _UNCOUNTED_FIELDS else len(value)
        case Mapping():
            fields = cast("Mapping[str, Any]", value)
            return sum(_count_characters(one, key) for key, one in fields.items())
        case list() | tuple():
            return sum(_count_characters(one, name) for one in cast("Sequence[Any]", value))
        case _:
            return 0


class CompactionManager:
    """Compacts the conversation of a session, and stores the result in the session.

    model: the model that compacts; by default the last one that evaluated in the session.
    """

    @check_arguments
    def __init__(
        self,
        client: "OpenAI | AsyncOpenAI",
        config: CompactionConfig,
        session: SessionProtocol,
        *,
        model: str | None = None,
        api: ResponsesClient | None = None,
    ) -> None:
        if api is None:
            check_client(client)
        self._api = api or ResponsesClient(client)
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

    @property
    def has_conversation(self) -> bool:
        """Whether the session has a conversation."""
        transcript = self._session[Transcript].latest()
        return bool(transcript and transcript.items) or bool(self.state.encrypted_items)

    @property
    def threshold(self) -> int:
        return self._config.threshold_tokens

    def is_worthwhile(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether compaction gains anything. If the last one left nearly as many tokens as the threshold, another one
        would too: wait until a quarter of the threshold has been added.

        messages: those since the last compaction.
        """
        new = estimate_tokens(messages)
        left = self._tokens - 2 * new  # at least, by the last compaction: the estimate may be too low
        return not self.state.encrypted_items or new >= self.threshold // 4 or left <= self.threshold * 3 // 4

    def compact(
        self, messages: Sequence[Mapping[str, Any]], *, deadline: Deadline | None = None
    ) -> list[dict[str, Any]]:
        """Return the window that replaces these messages. Raises CompactionError, and then nothing has changed."""
        return BlockingShell(lambda: self._api.client).run(self.compact_steps(messages, deadline=deadline))

    def compact_steps(
        self, messages: Sequence[Mapping[str, Any]], *, deadline: Deadline | None = None
    ) -> Steps[list[dict[str, Any]]]:
        """As `compact`, for any shell."""
        used = self._session[LastModel].latest()
        model = self._model or (used.model if used else None)
        if model is None:
            raise CompactionError(
                self._tokens, ValueError("no model is known: pass model=, or evaluate a prompt first")
            )
        window = normalize_input_messages(self.inject_encrypted_items(messages))
        try:
            response = yield from self._api.compact(
                {"model": model, "input": window}, threshold=self.threshold, deadline=deadline
            )
        except Exception as error:
            raise CompactionError(self._tokens, error) from error
        if not response.output:
            raise CompactionError(self._tokens, ValueError("the provider returned an empty window"))
        state = CompactionState(tuple(response.output), self._tokens, self.state.compaction_count + 1)
        self._session[CompactionState].seed(state)
        return response.output

    def inject_encrypted_items(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the last window followed by the messages, unless they start with it already."""
        window = [dict(item) for item in self.state.encrypted_items]
        items = [dict(message) for message in messages]
        return items if items[: len(window)] == window else [*window, *items]
