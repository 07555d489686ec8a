"""Tools with which the model reads and writes any filesystem."""

from dataclasses import dataclass, field
from typing import Any

from fumehood.client.errors import WorkspaceSecurityError
from fumehood.client.filesystem import Filesystem
from fumehood.client.prompt._types import NoParams
from fumehood.client.prompt.section import MarkdownSection
from fumehood.client.prompt.tool import AnyTool, Tool, ToolContext, ToolResult

MAX_READ = 64_000
_REPORTED_ERRORS = (OSError, UnicodeDecodeError, WorkspaceSecurityError)

FILE_TOOLS_TEXT = """You have a workspace of files. `list_files` shows a directory, `glob_files` finds files by a
pattern, `read_file` shows one and `write_file` makes or replaces one. Paths are relative to the workspace."""


@dataclass(frozen=True)
class PathParams:
    path: str = field(default=".", metadata={"description": "Relative to the workspace."})


@dataclass(frozen=True)
class GlobParams:
    pattern: str = field(metadata={"description": "Such as **/*.py; * stays within one directory."})


@dataclass(frozen=True)
class WriteParams:
    path: str = field(metadata={"description": "Relative to the workspace."})
    content: str = field(metadata={"description": "The whole new text of the file."})


@dataclass(frozen=True)
class FileText:
    path: str
    text: str
    truncated: bool = False


@dataclass(frozen=True)
class FileList:
    paths: list[str]


def file_tools(filesystem: Filesystem) -> tuple[AnyTool, ...]:
    """Create read_file, write_file, list_files and glob_files for this filesystem."""

    def read(params: PathParams, *, context: ToolContext) -> ToolResult[FileText]:
        _ = context
        try:
            text = filesystem.read_text(params.path)
        except _REPORTED_ERRORS as error:
            return ToolResult.error(_format_error(error))
        return ToolResult.ok(FileText(params.path, text[:MAX_READ], len(text) > MAX_READ))

    def write(params: WriteParams, *, context: ToolContext) -> ToolResult[FileText]:
        _ = context
        try:
            filesystem.write_text(params.path, params.content)
        except _REPORTED_ERRORS as error:
            return ToolResult.error(_format_error(error))
        message = f"Wrote {len(params.content)} characters to {params.path}."
        return ToolResult(message, FileText(params.path, params.content), exclude_value_from_context=True)

    def list_(params: PathParams, *, context: ToolContext) -> ToolResult[FileList]:
        _ = context
        try:
            return ToolResult.ok(FileList(filesystem.list_dir(params.path)))
        except _REPORTED_ERRORS as error:
            return ToolResult.error(_format_error(error))

    def glob(params: GlobParams, *, context: ToolContext) -> ToolResult[FileList]:
        _ = context
        return ToolResult.ok(FileList(filesystem.glob(params.pattern)))

    return (
        Tool[PathParams, FileText](
            name="read_file", description="Read a text file of the workspace.", handler=read
        ),
        Tool[WriteParams, FileText](
            name="write_file", description="Make or replace a text file of the workspace.", handler=write
        ),
        Tool[PathParams, FileList](
            name="list_files", description="List a directory of the workspace.", handler=list_
        ),
        Tool[GlobParams, FileList](
            name="glob_files", description="Find files of the workspace by a pattern.", handler=glob
        ),
    )


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class VfsToolsSection(MarkdownSection[NoParams]):
    """Lets the model read and write a filesystem, which is `context.filesystem` for handlers."""

    def __init__(
        self, *, filesystem: Filesystem, template: str = FILE_TOOLS_TEXT, accepts_overrides: bool = True
    ) -> None:
        self.filesystem = filesystem
        super().__init__(
            title="Workspace files",
            key="vfs",
            template=template,
            tools=file_tools(filesystem),
            accepts_overrides=accepts_overrides,
        )

    def settings(self) -> dict[str, Any]:
        return {
            "filesystem": self.filesystem,
            "template": self.template,
            "accepts_overrides": self.accepts_overrides,
        }
