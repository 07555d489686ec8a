"""Hosted tools: the code interpreter and the shell.

Both execute in the container that the request is bound to, and turn its output into items, events and text for the
model.
"""

from fumehood.tools.call_output_collector import OutputLimits
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
