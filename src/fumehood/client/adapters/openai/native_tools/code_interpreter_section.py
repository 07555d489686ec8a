"""The code interpreter, for prompts that do not use its results."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fumehood.client.adapters.openai.code_interpreter import (
    AutoContainerConfig,
    ExistingContainerRef,
    build_container_spec,
)
from fumehood.client.adapters.openai.native_tools.native_tool_section import NativeToolSection


@dataclass(frozen=True)
class CodeInterpreterParams:
    container: AutoContainerConfig | ExistingContainerRef = field(default_factory=AutoContainerConfig)


class OpenAICodeInterpreterSection(NativeToolSection[CodeInterpreterParams]):
    native_name = "code_interpreter"

    def build_settings(self, params: CodeInterpreterParams) -> Mapping[str, object]:
        return {"container": build_container_spec(params.container)}
