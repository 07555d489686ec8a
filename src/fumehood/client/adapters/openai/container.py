"""Containers of the provider and the files in them; imports `api`, `config` and `errors`."""

import io
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fumehood.client.adapters.openai.api import is_container_gone, is_fumehood
from fumehood.client.adapters.openai.config import ContainerConfig
from fumehood.client.dbc import require
from fumehood.client.errors import ContainerExpiredError, Phase, PromptEvaluationError

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
        not content.startswith(_PROGRAMS) or _is_text(content),
        f"{name!r} is a program, whatever its name says; it cannot be uploaded.",
    )


def _is_text(content: bytes) -> bool:
    try:
        return "\0" not in content.decode()
    except UnicodeDecodeError:
        return False


class ContainerManager:
    """Makes containers, and moves files in and out.

    Raises ContainerExpiredError if the container is gone, FileNotFoundError if only the file is, and
    PromptEvaluationError for whatever else the provider refuses.
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
            raise _refused(error, "configuration") from error

    def is_alive(self, container_id: str) -> bool:
        import openai

        try:
            return self._sdk.containers.retrieve(container_id).status not in ("expired", "deleted")
        except openai.NotFoundError:
            return False
        except openai.OpenAIError as error:
            raise _refused(error) from error

    def upload(self, container_id: str, path: str, content: bytes) -> ContainerFile:
        """Put a file there. Its type is checked first."""
        check_upload(path, content)
        return self.put(container_id, path, content)

    def put(self, container_id: str, path: str, content: bytes) -> ContainerFile:
        """The same for what is not the user's choice: files that code writes, members of a workspace."""
        with self._using(container_id):
            return _file(self._sdk.containers.files.create(container_id, file=(path, io.BytesIO(content))))

    def attach(self, container_id: str, file_id: str) -> ContainerFile:
        """Put a file there that was uploaded to the provider before."""
        with self._using(container_id):
            return _file(self._sdk.containers.files.create(container_id, file_id=file_id))

    def unpack(self, container_id: str, archive: bytes) -> bool:
        """Put the files of a tar archive there. False if the server cannot unpack: then the archive itself is there,
        as ARCHIVE_NAME, and code has to.
        """
        unpacks = is_fumehood(self.client)
        more = {"extra_body": {"unpack": "true"}} if unpacks else {}
        with self._using(container_id):
            self._sdk.containers.files.create(container_id, file=(ARCHIVE_NAME, io.BytesIO(archive)), **more)
        return unpacks

    def files(self, container_id: str) -> list[ContainerFile]:
        """All of them, oldest first."""
        with self._using(container_id):
            listed = self._sdk.containers.files.list(container_id, limit=100, order="asc")
            return [_file(found) for found in listed]

    def read(self, container_id: str, file_id: str) -> bytes:
        with self._using(container_id):
            return self._sdk.containers.files.content.retrieve(file_id, container_id=container_id).read()

    def delete(self, container_id: str, file_id: str) -> None:
        with self._using(container_id):
            self._sdk.containers.files.delete(file_id, container_id=container_id)

    @contextmanager
    def _using(self, container_id: str) -> Generator[None]:
        """Errors of the SDK as ours."""
        import openai

        try:
            yield
        except openai.OpenAIError as error:
            if not is_container_gone(error):
                raise _refused(error) from error
            if self.is_alive(container_id):
                raise FileNotFoundError(str(error)) from error
            message = f"The container {container_id!r} has expired, and its files are gone."
            raise ContainerExpiredError(container_id, error, message) from error


def _refused(error: Exception, phase: Phase = "request") -> PromptEvaluationError:
    return PromptEvaluationError(
        f"The container could not be used: {error}",
        phase=phase,
        provider_payload=getattr(error, "body", None),
    )


def _file(found: Any) -> ContainerFile:
    return ContainerFile(found.id, str(found.path).removeprefix(MOUNT), found.bytes or 0, str(found.source))
