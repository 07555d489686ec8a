"""Containers of the provider and the files in them; imports `api`, `config` and `errors`."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fumehood.client.adapters.openai.api import is_container_gone, is_fumehood
from fumehood.client.adapters.openai.config import ContainerConfig
from fumehood.client.dbc import require
from fumehood.client.errors import PromptEvaluationError

if TYPE_CHECKING:
    from openai import OpenAI

MOUNT = "/mnt/data/"
ARCHIVE_NAME = "workspace.tar"

# What OpenAI's documentation lists as files for the code interpreter.
_CODE = ("c", "cpp", "cs", "css", "go", "html", "ipynb", "java", "js", "php", "py", "rb", "sh", "tex", "ts")
_DOCUMENTS = ("doc", "docx", "md", "pdf", "pptx", "txt", "xlsx")
_DATA = ("csv", "json", "pkl", "tar", "xml", "yaml", "yml", "zip")
_PICTURES = ("gif", "jpeg", "jpg", "png", "svg", "webp")
UPLOAD_TYPES = frozenset((*_CODE, *_DOCUMENTS, *_DATA, *_PICTURES))
_PROGRAMS = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")


@dataclass(frozen=True)
class ContainerFile:
    """`path` is relative to the container's working directory."""

    id: str
    path: str
    bytes: int
    source: str


def check_upload(name: str, content: bytes) -> None:
    """Raise PromptValidationError unless the code interpreter takes such a file."""
    extension = name.rpartition(".")[2].lower() if "." in name.rpartition("/")[2] else ""
    known = extension in UPLOAD_TYPES or (not extension and _is_text(content))
    require(
        known,
        f"Files such as {name!r} cannot be uploaded; the code interpreter takes: {' '.join(sorted(UPLOAD_TYPES))}.",
    )
    require(
        not content.startswith(_PROGRAMS),
        f"{name!r} is a program, whatever its name says; it cannot be uploaded.",
    )


def _is_text(content: bytes) -> bool:
    try:
        return "\0" not in content.decode()
    except UnicodeDecodeError:
        return False


class ContainerManager:
    """Makes containers, and moves files in and out. Errors of the SDK come out as PromptEvaluationError, those that say
    that a container is gone as they are.
    """

    def __init__(self, client: "OpenAI", config: ContainerConfig | None = None) -> None:
        self.client = client
        self.config = config or ContainerConfig()
        self._sdk: Any = client

    def create(self, name: str = "fumehood-workspace") -> str:
        """A new container's id."""
        import openai

        try:
            return self._sdk.containers.create(name=name, memory_limit=self.config.memory_limit).id
        except openai.OpenAIError as error:
            raise _unusable(error) from error

    def is_alive(self, container_id: str) -> bool:
        import openai

        try:
            found = self._sdk.containers.retrieve(container_id)
        except openai.NotFoundError:
            return False
        except openai.OpenAIError as error:
            raise _normalised(error) from error
        return found.status not in ("expired", "deleted")

    def memory_limit(self, container_id: str) -> str | None:
        return getattr(self._ask(self._sdk.containers.retrieve, container_id), "memory_limit", None)

    def upload(self, container_id: str, path: str, content: bytes) -> ContainerFile:
        """Put a file there. Its type is checked first."""
        check_upload(path, content)
        return self.put(container_id, path, content)

    def put(self, container_id: str, path: str, content: bytes) -> ContainerFile:
        """The same for what is not the user's choice: files that code writes, members of a workspace."""
        return self._post(container_id, path, content)

    def attach(self, container_id: str, file_id: str) -> ContainerFile:
        """Put a file there that was uploaded to the provider before."""
        return _file(self._ask(self._sdk.containers.files.create, container_id, file_id=file_id))

    def unpack(self, container_id: str, archive: bytes) -> bool:
        """Put the files of a tar archive there. False if the server cannot unpack: then the archive itself is there,
        as ARCHIVE_NAME, and code has to.
        """
        if is_fumehood(self.client):
            self._post(container_id, ARCHIVE_NAME, archive, extra_body={"unpack": "true"})
            return True
        self._post(container_id, ARCHIVE_NAME, archive)
        return False

    def files(self, container_id: str) -> Iterator[ContainerFile]:
        import openai

        try:
            for found in self._sdk.containers.files.list(container_id, limit=100):
                yield _file(found)
        except openai.OpenAIError as error:
            raise _normalised(error) from error

    def read(self, container_id: str, file_id: str) -> bytes:
        answer = self._ask(self._sdk.containers.files.content.retrieve, file_id, container_id=container_id)
        return answer.read()

    def delete(self, container_id: str, file_id: str) -> None:
        self._ask(self._sdk.containers.files.delete, file_id, container_id=container_id)

    def _post(self, container_id: str, path: str, content: bytes, **more: Any) -> Any:
        # The name of a part may not have directories in it for every server, so the path goes as the file's name only
        # where it has none; see ContainerFilesystem for what is done with the others.
        found = self._ask(
            self._sdk.containers.files.create, container_id, file=(path, io.BytesIO(content)), **more
        )
        return _file(found) if not more else found

    def _ask(self, call: Any, *arguments: Any, **named: Any) -> Any:
        import openai

        try:
            return call(*arguments, **named)
        except openai.OpenAIError as error:
            raise _normalised(error) from error


def _normalised(error: Exception) -> Exception:
    return error if is_container_gone(error) else _unusable(error)


def _unusable(error: Exception) -> PromptEvaluationError:
    return PromptEvaluationError(
        f"The container could not be used: {error}",
        phase="request",
        provider_payload=getattr(error, "body", None),
    )


def _file(found: Any) -> ContainerFile:
    return ContainerFile(found.id, str(found.path).removeprefix(MOUNT), found.bytes or 0, str(found.source))
