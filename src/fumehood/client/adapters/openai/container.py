"""Containers of the provider, and their files."""

import io
import posixpath
import tarfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from fumehood.client.adapters.openai.config import ContainerConfig, check_client
from fumehood.client.adapters.openai.container_errors import ContainerGoneError, build_container_error
from fumehood.client.adapters.openai.responses_client import is_fumehood_gateway, send_with_retry
from fumehood.client.dbc import require
from fumehood.client.deadlines import Deadline
from fumehood.client.errors import PromptEvaluationError, PromptValidationError
from fumehood.client.filesystem import normalize_path
from fumehood.client.parallel import WorkerCancellation
from fumehood.client.throttle import ThrottlePolicy
from fumehood.client.type_validation import check_arguments

if TYPE_CHECKING:
    from openai import OpenAI

WORKING_DIRECTORY = "/mnt/data/"
ARCHIVE_NAME = "workspace.tar"
_UNPACK_FIELDS = {"unpack": "true"}
_DELETE_TIMEOUT_SECONDS = 5

# File types that OpenAI documents for the code interpreter.
_CODE = ("c", "cpp", "cs", "css", "go", "html", "ipynb", "java", "js", "php", "py", "rb", "sh", "tex", "ts")
_DOCUMENTS = ("doc", "docx", "md", "pdf", "pptx", "txt", "xlsx")
_DATA = ("csv", "json", "pkl", "tar", "xml", "yaml", "yml", "zip")
_IMAGES = ("gif", "jpeg", "jpg", "png", "svg", "webp")
UPLOAD_TYPES = frozenset((*_CODE, *_DOCUMENTS, *_DATA, *_IMAGES))
_EXECUTABLE_SIGNATURES = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")


@dataclass(frozen=True)
class ContainerFileEntry:
    """path: relative to the container's working directory."""

    id: str
    path: str
    bytes: int
    source: str


class ContainerLink(msgspec.Struct, frozen=True):
    """A symbolic link. path: relative to the container's working directory. target: as code has written it."""

    path: str
    target: str

    @property
    def destination(self) -> str:
        """The path that it leads to, relative to the working directory. Raises WorkspaceSecurityError if outside."""
        start = WORKING_DIRECTORY + posixpath.dirname(self.path)
        absolute = posixpath.normpath(posixpath.join(start, self.target))
        relative = absolute.removeprefix(WORKING_DIRECTORY)
        return normalize_path("." if absolute == WORKING_DIRECTORY.rstrip("/") else relative)


class UnlistedContainerFiles(msgspec.Struct, frozen=True):
    """What a container has besides its listed files.

    links: symbolic links. paths: files beyond the limits of a container, or written since the last call. truncated:
    whether there is more that cannot be named.
    """

    links: list[ContainerLink] = msgspec.field(name="fumehood:links", default_factory=list[ContainerLink])
    paths: list[str] = msgspec.field(name="fumehood:unlisted", default_factory=list[str])
    truncated: bool = msgspec.field(name="fumehood:truncated", default=False)


def check_upload(name: str, content: bytes) -> None:
    """Raise PromptValidationError unless OpenAI's code interpreter accepts such a file."""
    extension = name.rpartition(".")[2].lower() if "." in name.rpartition("/")[2] else ""
    known = extension in UPLOAD_TYPES or (not extension and _is_text(content))
    require(
        known,
        f"Files such as {name!r} cannot be uploaded; the code interpreter takes: {' '.join(sorted(UPLOAD_TYPES))}.",
    )
    require(
        not content.startswith(_EXECUTABLE_SIGNATURES) or _is_text(content),
        f"{name!r} is a program, whatever its name says; it cannot be uploaded.",
    )


def _is_text(content: bytes) -> bool:
    try:
        return "\0" not in content.decode()
    except UnicodeDecodeError:
        return False


class ContainerManager:
    """Creates containers, and transfers files.

    Raises ContainerExpiredError or ContainerNotFoundError if the container is gone, FileNotFoundError if only the file
    is, and PromptEvaluationError for any other error of the provider. policy: retries for a busy provider.
    deadline: for all requests together. token: cancels parallel transfers.
    """

    @check_arguments
    def __init__(
        self,
        client: "OpenAI",
        config: ContainerConfig | None = None,
        *,
        policy: ThrottlePolicy | None = None,
        deadline: Deadline | None = None,
        token: WorkerCancellation | None = None,
    ) -> None:
        check_client(client)
        self.client = client
        self.config = config or ContainerConfig()
        self._policy = policy or ThrottlePolicy()
        self._deadline = deadline
        self._token = token or WorkerCancellation()
        self._sdk: Any = client.with_options(max_retries=0)  # the policy retries

    def create(self, name: str = "fumehood-workspace") -> str:
        """Create a container and return its id. Raises PromptEvaluationError if that is refused."""
        make = self._sdk.containers.create
        size = self.config.memory_limit
        try:
            return self._send(lambda more: make(name=name, memory_limit=size, **more)).id
        except PromptEvaluationError as error:
            error.phase = "configuration"
            raise

    def is_alive(self, container_id: str) -> bool:
        import openai

        def look(more: dict[str, Any]) -> bool:
            try:
                found = self._sdk.containers.retrieve(container_id, **more)
            except openai.NotFoundError:
                return False
            return found.status not in ("expired", "deleted")

        return self._send(look)

    def delete_container(self, container_id: str) -> None:
        """Delete a container, without retries."""
        import openai

        with suppress(openai.OpenAIError):
            self._sdk.containers.delete(container_id, timeout=_DELETE_TIMEOUT_SECONDS)

    def upload(self, container_id: str, path: str, content: bytes) -> ContainerFileEntry:
        """Upload a file of a type that the server accepts; else raise PromptValidationError.

        A fumehood gateway says which types these are; for other servers the list of OpenAI's documentation counts.
        """
        if not is_fumehood_gateway(self.client, deadline=self._deadline):
            check_upload(path, content)
        try:
            return self._upload(container_id, path, content)
        except PromptEvaluationError as error:
            if _is_unsupported_file(error):
                message = f"{path!r} cannot be uploaded. {error.message}"
                raise PromptValidationError(message, provider_payload=error.provider_payload) from error
            raise

    def upload_unchecked(self, container_id: str, path: str, content: bytes) -> ContainerFileEntry:
        """As `upload`, of any type: for files that the user did not choose, such as files written by code.

        The server chooses the path: OpenAI prepends a prefix to the name.
        """
        try:
            return self._upload(container_id, path, content)
        except PromptEvaluationError as error:
            if _is_unsupported_file(error) and is_fumehood_gateway(self.client, deadline=self._deadline):
                return self._upload_archived(container_id, path, content)
            raise

    def _upload(self, container_id: str, path: str, content: bytes) -> ContainerFileEntry:
        make = self._sdk.containers.files.create
        return self._send_to_container(
            container_id,
            lambda more: _read_entry(make(container_id, file=(path, io.BytesIO(content)), **more)),
        )

    def _upload_archived(self, container_id: str, path: str, content: bytes) -> ContainerFileEntry:
        """Upload a file as the member of an archive that the gateway unpacks; members may be of any type."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            member = tarfile.TarInfo(path)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        make = self._sdk.containers.files.create

        def send(more: dict[str, Any]) -> ContainerFileEntry:
            file = (ARCHIVE_NAME, io.BytesIO(packed.getvalue()))
            return _read_entry(make(container_id, file=file, extra_body=_UNPACK_FIELDS, **more))

        return self._send_to_container(container_id, send)

    def attach(self, container_id: str, file_id: str) -> ContainerFileEntry:
        """Attach a file that was uploaded to the provider before."""
        make = self._sdk.containers.files.create
        return self._send_to_container(
            container_id, lambda more: _read_entry(make(container_id, file_id=file_id, **more))
        )

    def unpack(self, container_id: str, archive: Path) -> ContainerFileEntry | None:
        """Upload a tar archive and unpack it. If the server cannot unpack it, the archive is uploaded for code to
        unpack.
        """
        unpacks = is_fumehood_gateway(self.client, deadline=self._deadline)
        fields: dict[str, Any] = {"extra_body": _UNPACK_FIELDS} if unpacks else {}

        def send(more: dict[str, Any]) -> ContainerFileEntry:
            with archive.open("rb") as file:
                make = self._sdk.containers.files.create
                return _read_entry(make(container_id, file=(ARCHIVE_NAME, file), **fields, **more))

        made = self._send_to_container(container_id, send)
        return None if unpacks else made

    def list_files(self, container_id: str) -> list[ContainerFileEntry]:
        """Return all files, oldest first."""
        listed = self._sdk.containers.files.list
        return self._send_to_container(
            container_id,
            lambda more: [_read_entry(one) for one in listed(container_id, limit=100, order="asc", **more)],
        )

    def find_unlisted_files(self, container_id: str) -> UnlistedContainerFiles:
        """Return what `list_files` does not show; only a fumehood gateway can tell."""
        if not is_fumehood_gateway(self.client, deadline=self._deadline):
            return UnlistedContainerFiles()
        listed = self._sdk.containers.files.with_raw_response.list
        answer = self._send_to_container(
            container_id, lambda more: listed(container_id, limit=1, extra_query={"unlisted": "true"}, **more)
        )
        return msgspec.json.decode(answer.content, type=UnlistedContainerFiles)

    def read_file(self, container_id: str, file_id: str) -> bytes:
        load = self._sdk.containers.files.content.retrieve
        return self._send_to_container(
            container_id, lambda more: load(file_id, container_id=container_id, **more).read()
        )

    def download_file(self, container_id: str, file_id: str, target: Path) -> None:
        """Download a file of any size to a local file."""
        load = self._sdk.containers.files.content.with_streaming_response.retrieve

        with self._token.partial_file(target) as part:

            def send(more: dict[str, Any]) -> None:
                with load(file_id, container_id=container_id, **more) as answer, part.open("r+b") as file:
                    file.truncate()  # left from an interrupted attempt
                    for chunk in answer.iter_bytes():
                        self._token.check()
                        file.write(chunk)

            self._send_to_container(container_id, send)

    def delete_file(self, container_id: str, file_id: str) -> None:
        drop = self._sdk.containers.files.delete
        self._send_to_container(container_id, lambda more: drop(file_id, container_id=container_id, **more))

    def _send[T](self, send: Callable[[dict[str, Any]], T]) -> T:
        return send_with_retry(send, self._policy, deadline=self._deadline, sleep=self._token.sleep)

    def _send_to_container[T](self, container_id: str, send: Callable[[dict[str, Any]], T]) -> T:
        try:
            return self._send(send)
        except ContainerGoneError as error:
            if self.is_alive(container_id):
                raise FileNotFoundError(str(error)) from error
            raise build_container_error(container_id, error, "its files are gone") from error


def _is_unsupported_file(error: PromptEvaluationError) -> bool:
    payload = error.provider_payload
    return (
        isinstance(payload, Mapping) and cast(Mapping[str, object], payload).get("code") == "unsupported_file"
    )


def _read_entry(found: Any) -> ContainerFileEntry:
    return ContainerFileEntry(
        found.id, str(found.path).removeprefix(WORKING_DIRECTORY), found.bytes or 0, str(found.source)
    )
