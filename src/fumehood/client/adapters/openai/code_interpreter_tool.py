"""OpenAI's code interpreter as a provider tool, and its results."""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from fumehood.client.adapters.openai.config import DEFAULT_MEMORY_LIMIT, check_memory_tier
from fumehood.client.adapters.openai.wire import (
    EXECUTION_FIELD,
    FILE_CITATION_TYPE,
    ProviderToolCallData,
    find_cited_files,
    only_objects,
)
from fumehood.client.adapters.provider_adapter import CitedFile
from fumehood.client.dbc import require, require_strings
from fumehood.client.errors import PromptValidationError
from fumehood.client.prompt._types import NoParams
from fumehood.client.prompt.tool import (
    ProviderOutputHandler,
    ProviderTool,
    ToolContext,
    ToolHandler,
    ToolResult,
)
from fumehood.client.type_validation import check_arguments, require_field_types

_DESCRIPTION = (
    "Runs Python that the model writes itself, in a container that keeps its variables and files between calls. "
    "It takes no parameters."
)
_MAX_STDERR = 4_000
_TRACEBACK = "Traceback (most recent call last):"
# The last line of a traceback: an exception's name, and possibly its message.
_EXCEPTION_LINE = re.compile(r"[A-Za-z_][\w.]*(: .*)?\Z")


@dataclass(frozen=True)
class AutoContainerConfig:
    """A container that the provider creates on demand, with these files."""

    type: Literal["auto"] = "auto"
    memory_limit: str = DEFAULT_MEMORY_LIMIT
    file_ids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_field_types(self, "container.")
        check_memory_tier(self.memory_limit, "container.memory_limit")
        require_strings(self.file_ids, "container.file_ids")

    def attach(self, *file_ids: str) -> "AutoContainerConfig":
        """Return a copy with further uploaded files."""
        return replace(self, file_ids=(*self.file_ids, *file_ids))


@dataclass(frozen=True)
class ExistingContainerRef:
    """An existing container; `memory_limit` only states what it has."""

    id: str
    memory_limit: str | None = None

    def __post_init__(self) -> None:
        require_field_types(self, "container.")
        require(
            self.id.strip(),
            f"container.id is {self.id!r}: name the container, or use AutoContainerConfig.",
        )
        if self.memory_limit is not None:
            check_memory_tier(self.memory_limit, "container.memory_limit")


@dataclass(frozen=True)
class CodeInterpreterConfig:
    container: AutoContainerConfig | ExistingContainerRef = field(default_factory=AutoContainerConfig)

    def __post_init__(self) -> None:
        require_field_types(self)


@dataclass(frozen=True)
class CodeInterpreterFile:
    """A file that a call wrote, as the fumehood gateway describes it.

    sha256: hexadecimal, None if no copy is kept. content: None if the file is too large to be sent along; the
    container's files endpoint serves it.
    """

    container_id: str
    file_id: str
    filename: str
    path: str
    size: int
    mime_type: str
    sha256: str | None = None
    content: bytes | None = None


@dataclass(frozen=True)
class CodeInterpreterResult:
    """The result of a call.

    images: URLs. files: cited or listed files.
    exit_code, produced_files, missing_files: only from the fumehood gateway. produced_files: with their content.
    missing_files: paths of files that the call wrote and that could not be read.
    """

    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    images: tuple[str, ...] = ()
    files: tuple[CitedFile, ...] = ()
    container_id: str | None = None
    code: str | None = None
    produced_files: tuple[CodeInterpreterFile, ...] = ()
    missing_files: tuple[str, ...] = ()


class OpenAICodeInterpreterTool(ProviderTool[NoParams, CodeInterpreterResult, CodeInterpreterConfig]):
    """Python that the model writes and the provider runs. Add it to a section like any other tool."""

    @check_arguments
    def __init__(
        self,
        *,
        container: AutoContainerConfig | ExistingContainerRef | None = None,
        config: CodeInterpreterConfig | None = None,
        name: str = "code_interpreter",
        description: str = _DESCRIPTION,
        handler: ToolHandler[NoParams, CodeInterpreterResult] | None = None,
        handle_provider_output: ProviderOutputHandler[CodeInterpreterResult] | None = None,
    ) -> None:
        """handle_provider_output: by default `build_code_interpreter_result`, unless there is a handler."""
        require(container is None or config is None, "container and config say the same; give one of them.")
        if handler is None and handle_provider_output is None:
            handle_provider_output = build_code_interpreter_result
        found = config or CodeInterpreterConfig(container or AutoContainerConfig())
        build_container_spec(found.container)  # validates the container
        super().__init__(
            name=name,
            description=description,
            provider="openai",
            native_type="code_interpreter",
            config=found,
            handler=handler,
            handle_provider_output=handle_provider_output,
        )

    def envelope(self) -> Mapping[str, object]:
        return {
            "type": "built_in",
            "name": "code_interpreter",
            "container": build_container_setting(self.config.container),
        }

    def attach(self, *file_ids: str) -> "OpenAICodeInterpreterTool":
        """Return a copy with further uploaded files in its container."""
        container = self.config.container
        if not isinstance(container, AutoContainerConfig):
            raise PromptValidationError(
                f"The container {container.id!r} is there already; use ContainerManager.attach."
            )
        return OpenAICodeInterpreterTool(
            container=container.attach(*file_ids),
            name=self.name,
            description=self.description,
            handler=self.handler,
            handle_provider_output=self.handle_provider_output,
        )


def build_container_spec(container: object) -> str | dict[str, Any]:
    """Return the container as it is sent; accepts the wire form and `{"id": …}` as well.

    Raises PromptValidationError for an invalid memory limit or id, and for anything else.
    """
    if isinstance(container, str):
        container = ExistingContainerRef(container)
    elif isinstance(container, Mapping):
        written = {str(name): value for name, value in cast(Mapping[Any, Any], container).items()}
        if "id" not in written:
            tier, files = written.get("memory_limit", DEFAULT_MEMORY_LIMIT), written.get("file_ids", ())
            AutoContainerConfig(cast(Any, written.get("type")), tier, files)  # for its validation
            return written
        container = ExistingContainerRef(written["id"], written.get("memory_limit"))
    if isinstance(container, ExistingContainerRef):
        return container.id
    if not isinstance(container, AutoContainerConfig):
        raise PromptValidationError(
            f"container is {container!r}; it has to be AutoContainerConfig or ExistingContainerRef."
        )
    spec: dict[str, Any] = {"type": "auto", "memory_limit": container.memory_limit}
    return {**spec, "file_ids": [*container.file_ids]} if container.file_ids else spec


def build_container_setting(container: object) -> object:
    """Return the container for an entry of `native_tools`: as it is sent, with the stated memory limit of an existing
    one.
    """
    if isinstance(container, ExistingContainerRef) and container.memory_limit is not None:
        return {"id": container.id, "memory_limit": container.memory_limit}
    return build_container_spec(container)


def find_stated_memory_limit(native_tools: Sequence[Mapping[str, object]]) -> str | None:
    """Return the memory limit that the settings of a code interpreter state."""
    for tool in native_tools:
        container = tool.get("container") if tool.get("name") == "code_interpreter" else None
        if isinstance(container, Mapping):
            limit = cast(Mapping[str, object], container).get("memory_limit")
            return limit if isinstance(limit, str) else None
    return None


def build_code_interpreter_result(
    data: ProviderToolCallData, context: ToolContext, result_type: type[CodeInterpreterResult]
) -> ToolResult[CodeInterpreterResult]:
    """Build a result from the provider's report.

    It is a failure if the call failed, if the exit code is not 0, or, without an exit code, if the logs end in a
    traceback.
    """
    _ = context
    logs = "".join(str(output.get("logs") or "") for output in data.outputs if output.get("type") == "logs")
    images = tuple(str(output.get("url")) for output in data.outputs if output.get("type") == "image")
    summary = only_objects([data.raw.get(EXECUTION_FIELD)])
    execution: Mapping[str, Any] = summary[0] if summary else {}
    exit_code: object = execution.get("exit_code")
    raised = _find_traceback(logs)
    failed = (
        data.status in ("failed", "incomplete") or bool(exit_code) or (exit_code is None and bool(raised))
    )
    value = result_type(
        stdout=str(execution.get("stdout", logs)),
        stderr=str(execution.get("stderr") or raised)[-_MAX_STDERR:],
        exit_code=exit_code if isinstance(exit_code, int) else None,
        images=images,
        files=_cited_files(execution, data),
        container_id=data.container_id,
        code=data.code,
        produced_files=tuple(map(_build_file, only_objects(execution.get("files")))),
        missing_files=tuple(
            str(file.get("path", "")) for file in only_objects(execution.get("missing_files"))
        ),
    )
    message = logs or (f"The call of the code interpreter is {data.status}." if failed else "")
    return ToolResult(message, value, success=not failed)


def _find_traceback(logs: str) -> str:
    """Return the traceback at the end of the logs, or an empty string."""
    start = logs.rfind(_TRACEBACK)
    lines = logs.rstrip().splitlines()
    return logs[start:] if start >= 0 and lines and _EXCEPTION_LINE.match(lines[-1]) else ""


def _cited_files(execution: Mapping[str, Any], data: ProviderToolCallData) -> tuple[CitedFile, ...]:
    """Return cited files, then files that are only listed; each once."""
    listed = [{**file, "type": FILE_CITATION_TYPE} for file in only_objects(execution.get("files"))]
    cited = [note for note in data.annotations if data.container_id in (None, note.get("container_id"))]
    return find_cited_files([*cited, *listed])


def _build_file(file: Mapping[str, Any]) -> CodeInterpreterFile:
    """Responses are untrusted: a value of the wrong type counts as missing."""
    size, digest, content = file.get("bytes"), file.get("sha256"), file.get("content")
    return CodeInterpreterFile(
        container_id=str(file.get("container_id", "")),
        file_id=str(file.get("file_id", "")),
        filename=str(file.get("filename", "")),
        path=str(file.get("path", "")),
        size=size if isinstance(size, int) else 0,
        mime_type=str(file.get("mime_type", "application/octet-stream")),
        sha256=digest if isinstance(digest, str) else None,
        content=_decode_base64(content) if isinstance(content, str) else None,
    )


def _decode_base64(content: str) -> bytes | None:
    try:
        return base64.b64decode(content, validate=True)
    except ValueError:
        return None
