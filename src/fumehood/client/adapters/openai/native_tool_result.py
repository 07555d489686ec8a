"""The default handler of provider output: the result of a call that the provider has run."""

from typing import Any

from fumehood.client.adapters.openai.code_interpreter_tool import (
    CodeInterpreterResult,
    build_code_interpreter_result,
)
from fumehood.client.prompt.tool import ProviderToolCallData, ToolContext, ToolResult


def build_provider_result(
    data: ProviderToolCallData, context: ToolContext, result_type: type[Any] = CodeInterpreterResult
) -> ToolResult[Any]:
    """Build the result of a native tool's call; a `handle_provider_output` of your own may call it.

    result_type: of a code interpreter, CodeInterpreterResult or a dataclass with its fields. The value of any other
    tool's result is the report itself.
    """
    if data.name == "code_interpreter":
        return build_code_interpreter_result(data, context, result_type)
    return ToolResult(f"{data.name}: {data.status or 'completed'}", data, success=data.status != "failed")
