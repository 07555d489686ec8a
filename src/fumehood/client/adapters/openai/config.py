"""Settings of the OpenAI adapter, validated when they are created."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fumehood.client.dbc import require, require_strings
from fumehood.client.errors import PromptValidationError
from fumehood.client.type_validation import require_field_types, require_type, shorten_repr

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

# Set by the adapter itself, or not possible in a blocking request.
_RESERVED_FIELDS = (
    "input",
    "tools",
    "tool_choice",
    "text",
    "include",
    "stream",
    "store",
    "model",
    "background",
)

MEMORY_TIERS = ("1g", "4g", "16g", "64g")
DEFAULT_MEMORY_LIMIT = "1g"  # of containers that a code interpreter asks for

# Native tools by model prefix. Other models are not restricted.
NATIVE_TOOLS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        ("gpt-4o", "gpt-4.1", "gpt-5", "o3", "o4-mini"),
        frozenset({"code_interpreter", "file_search", "web_search"}),
    ),
    "gpt-4.1-nano": frozenset({"code_interpreter", "file_search"}),
}

# Models without encrypted reasoning, for which OpenAI rejects a request for it.
MODELS_WITHOUT_REASONING = ("gpt-4o", "gpt-4.1")


def check_client(client: object) -> None:
    """Raise PromptValidationError unless it is a blocking client of the SDK."""
    require(
        hasattr(client, "with_options"),
        f"client is {shorten_repr(client)}; it has to be a client of the SDK, such as OpenAI().",
    )
    require(
        not inspect.iscoroutinefunction(getattr(client, "close", None)),
        "client is an asynchronous one; pass an OpenAI(…). An adapter takes an AsyncOpenAI(…) as async_client=.",
    )


def check_memory_tier(memory_limit: str, name: str) -> None:
    require_type(memory_limit, str, name)
    require(
        memory_limit in MEMORY_TIERS,
        f"{name} is {memory_limit!r}; it has to be one of {', '.join(MEMORY_TIERS)}.",
    )


@dataclass(frozen=True)
class OpenAIModelConfig:
    """Sampling settings; None for the provider's default. `extra` is added to every request as it is."""

    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        require_field_types(self)
        for name, most in (("temperature", 2), ("top_p", 1)):
            value: float | None = getattr(self, name)
            require(
                value is None or 0 <= value <= most, f"{name} is {value!r}; it has to be from 0 to {most}."
            )
        limit = self.max_output_tokens
        require(limit is None or limit > 0, f"max_output_tokens is {limit!r}; it has to be positive.")
        twice = self.extra.keys() & {*_RESERVED_FIELDS, *self._set_fields()}
        require(not twice, f"extra contains {min(twice, default='')!r}, which is set elsewhere.")

    def build_request_fields(self) -> dict[str, Any]:
        return {**self._set_fields(), **self.extra}

    def _set_fields(self) -> dict[str, Any]:
        names = ("temperature", "top_p", "max_output_tokens", "parallel_tool_calls", "reasoning")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True)
class OpenAIClientConfig:
    """Connection settings; None for the SDK's environment variables."""

    api_key: str | None = field(default=None, repr=False)
    base_url: str | None = None
    organization: str | None = None
    project: str | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        require_field_types(self)
        url = self.base_url
        require(
            url is None or url.startswith(("http://", "https://")),
            f"base_url is {url!r}; it has to begin with http:// or https://.",
        )
        require(
            self.timeout is None or self.timeout > 0, f"timeout is {self.timeout}; it has to be positive."
        )

    def create_client(self) -> "OpenAI":
        """Create a client of the SDK. Raises PromptValidationError without the SDK or without a key."""
        return self._create("OpenAI")

    def create_async_client(self) -> "AsyncOpenAI":
        """As `create_client`, for an event loop."""
        return self._create("AsyncOpenAI")

    def _create(self, class_name: str) -> Any:
        try:
            import openai
        except ImportError as error:
            raise PromptValidationError(
                "The openai package is missing; install fumehood[openai], or pass client= yourself."
            ) from error
        names = ("api_key", "base_url", "organization", "project", "timeout")
        options: dict[str, Any] = {
            name: getattr(self, name) for name in names if getattr(self, name) is not None
        }
        try:
            return getattr(openai, class_name)(**options)
        except openai.OpenAIError as error:
            raise PromptValidationError(f"No client of OpenAI could be made: {error}") from error


@dataclass(frozen=True)
class FileSearchConfig:
    """Vector stores to search, and the maximum number of results."""

    vector_store_ids: tuple[str, ...] = ()
    max_results: int = 20

    def __post_init__(self) -> None:
        require_field_types(self)
        self.envelope()

    def envelope(self) -> Mapping[str, object]:
        return file_search_envelope(self.vector_store_ids, self.max_results)


@dataclass(frozen=True)
class OpenAIHostedToolsConfig:
    """Tools that the provider runs. A container workspace needs the code interpreter."""

    code_interpreter: bool = False
    file_search: FileSearchConfig | None = None
    web_search: bool = False

    def __post_init__(self) -> None:
        require_field_types(self, "hosted_tools.")

    def envelopes(self) -> list[Mapping[str, object]]:
        """Return the entries for `RenderedPrompt.native_tools`."""
        found: list[Mapping[str, object]] = []
        if self.code_interpreter:
            found.append({"type": "built_in", "name": "code_interpreter"})
        if self.file_search is not None:
            found.append(self.file_search.envelope())
        if self.web_search:
            found.append({"type": "built_in", "name": "web_search"})
        return found


def file_search_envelope(vector_store_ids: tuple[str, ...], max_results: int) -> Mapping[str, object]:
    """Raise PromptValidationError for malformed settings; a missing store is found later."""
    require_strings(vector_store_ids, "vector_store_ids")
    require_type(max_results, int, "max_results")
    require(1 <= max_results <= 50, f"max_results is {max_results!r}; it has to be from 1 to 50.")
    return {
        "type": "built_in",
        "name": "file_search",
        "vector_store_ids": [*vector_store_ids],
        "max_num_results": max_results,
    }


@dataclass(frozen=True)
class ContainerConfig:
    """The container of a workspace.

    mode: "explicit" creates a container; "auto" reuses the one of an earlier workspace of this mode in the same
    session, while it is alive and of the same size.
    """

    memory_limit: str = "4g"
    mode: Literal["auto", "explicit"] = "explicit"

    def __post_init__(self) -> None:
        require_field_types(self, "container_config.")
        check_memory_tier(self.memory_limit, "container_config.memory_limit")


@dataclass(frozen=True)
class CompactionConfig:
    """When to compact the conversation of a session.

    enabled: compact automatically. threshold_tokens: above this number of tokens.
    zdr_mode: zero data retention: the provider stores nothing, and state is returned encrypted.
    """

    enabled: bool = True
    threshold_tokens: int = 100_000
    zdr_mode: bool = False

    def __post_init__(self) -> None:
        require_field_types(self)
        require(
            self.threshold_tokens > 0, f"threshold_tokens is {self.threshold_tokens}; it has to be positive."
        )
