"""Python, run by the provider, for prompts that do not look at its results; imports `base`, `code_interpreter`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fumehood.client.adapters.openai.code_interpreter import (
    AutoContainerConfig,
    ExistingContainerRef,
    container_spec,
)
from fumehood.client.adapters.openai.native_tools.base import NativeToolSection


@dataclass(frozen=True)
class CodeInterpreterParams:
    container: AutoContainerConfig | ExistingContainerRef = field(default_factory=AutoContainerConfig)


class OpenAICodeInterpreterSection(NativeToolSection[CodeInterpreterParams]):
    native_name = "code_interpreter"

    def settings(self, params: CodeInterpreterParams) -> Mapping[str, object]:
        return {"container": container_spec(params.container)}
