"""Tools that the gateway runs itself."""

from fumehood.tools.call_output import OutputLimits
from fumehood.tools.code_interpreter_tool import CodeInterpreterTool
from fumehood.tools.interpreter_call import CodeInterpreterToolSettings
from fumehood.tools.produced_files import InlineLimits
from fumehood.tools.shell_call import ShellToolSettings
from fumehood.tools.shell_tool import ShellTool

__all__ = [
    "CodeInterpreterTool",
    "CodeInterpreterToolSettings",
    "InlineLimits",
    "OutputLimits",
    "ShellTool",
    "ShellToolSettings",
]
