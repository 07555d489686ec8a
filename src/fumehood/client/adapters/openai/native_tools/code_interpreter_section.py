"""A prompt section that enables OpenAI's code interpreter.

To read its results, use `OpenAICodeInterpreterTool` instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fumehood.client.adapters.openai.code_interpreter_tool import (
    AutoContainerConfig,
    ExistingContainerRef,
    build_container_setting,
)
from fumehood.client.adapters.openai.native_tools.native_tool_section import NativeToolSection
from fumehood.client.type_validation import require_field_types


@dataclass(frozen=True)
class CodeInterpreterParams:
    container: AutoContainerConfig | ExistingContainerRef = field(default_factory=AutoContainerConfig)

    def __post_init__(self) -> None:
        require_field_types(self)


class OpenAICodeInterpreterSection(NativeToolSection[CodeInterpreterParams]):
    native_name = "code_interpreter"

    def build_settings(self, params: CodeInterpreterParams) -> Mapping[str, object]:
        return {"container": build_container_setting(params.container)}
