"""Search in vector stores, run by the provider."""

from collections.abc import Mapping
from dataclasses import dataclass

from fumehood.client.adapters.openai.config import file_search_envelope
from fumehood.client.adapters.openai.native_tools.native_tool_section import NativeToolSection
from fumehood.client.dbc import require
from fumehood.client.type_validation import require_field_types


@dataclass(frozen=True)
class FileSearchParams:
    """`corpus_ids` and `vector_store_ids` are synonyms; one of them is required to evaluate."""

    corpus_ids: tuple[str, ...] = ()
    max_results: int = 5
    vector_store_ids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_field_types(self)


class OpenAIFileSearchSection(NativeToolSection[FileSearchParams]):
    native_name = "file_search"

    def build_settings(self, params: FileSearchParams) -> Mapping[str, object]:
        require(
            not (params.corpus_ids and params.vector_store_ids),
            "corpus_ids and vector_store_ids are two names for the same; give one of them.",
        )
        spec = file_search_envelope(params.corpus_ids or params.vector_store_ids, params.max_results)
        return {name: value for name, value in spec.items() if name not in ("type", "name")}
