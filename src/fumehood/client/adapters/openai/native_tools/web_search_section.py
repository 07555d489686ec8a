"""Web search, run by the provider."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fumehood.client.adapters.openai.native_tools.native_tool_section import NativeToolSection
from fumehood.client.dbc import require, require_strings
from fumehood.client.type_validation import require_field_types

_SIZES = ("low", "medium", "high")


@dataclass(frozen=True)
class WebSearchParams:
    """Settings of a web search.

    allowed_domains: without a scheme; empty for all.
    """

    search_context_size: Literal["low", "medium", "high"] | None = None
    allowed_domains: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_field_types(self)


class OpenAIWebSearchSection(NativeToolSection[WebSearchParams]):
    native_name = "web_search"

    def build_settings(self, params: WebSearchParams) -> Mapping[str, object]:
        size = params.search_context_size
        require(
            size is None or size in _SIZES,
            f"search_context_size is {size!r}; it has to be low, medium or high.",
        )
        require_strings(params.allowed_domains, "allowed_domains")
        for domain in params.allowed_domains:
            require("/" not in domain, f"allowed_domains has {domain!r}; write example.com.")
        found: dict[str, object] = {} if size is None else {"search_context_size": size}
        if params.allowed_domains:
            found["filters"] = {"allowed_domains": [*params.allowed_domains]}
        return found
