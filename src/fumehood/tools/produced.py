"""What a call of code leaves behind: files, and pictures among them; imports `interfaces`, what is below, siblings."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from fumehood.aside import ITEM, aside
from fumehood.interfaces import Caller, Container, Containers
from fumehood.protocol.containers import DATA_DIRECTORY, ContainerFileRecord
from fumehood.protocol.errors import ApiError
from fumehood.protocol.file_types import media_type
from fumehood.protocol.items import ExecutionFile, Image, MissingFile, ProducedFile
from fumehood.protocol.names import clean_name, in_words
from fumehood.protocol.sandbox import FileEntry
from fumehood.protocol.sandbox_errors import SandboxError
from fumehood.tools.pictures import Picture, kind_of, may_be_picture

_FIGURE = "figure"
_FILES_NAMED = 20
_MOST_CONTENTS = 100  # files of one call whose content is sent


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineLimits:
    """How much of produced files is sent inside of items.

    file_bytes: the largest file; pictures beyond it are addresses of container files.
    total_bytes: of all contents of one call, pictures in `outputs` not counted.
    """

    file_bytes: int = 1 << 20
    total_bytes: int = 4 << 20


@dataclass(slots=True)
class Produced:
    """What a call has left: files and pictures.

    files: every file, the figures that were shown last. images: for clients. urls: data: URLs for models that see.
    details: of each file, by its id.
    missing: files that could not be fetched; complete: whether there are none.
    """

    files: list[ProducedFile] = field(default_factory=list[ProducedFile])
    images: list[Image] = field(default_factory=list[Image])
    urls: list[str] = field(default_factory=list[str])
    details: dict[str, ExecutionFile] = field(default_factory=dict[str, ExecutionFile])
    missing: list[MissingFile] = field(default_factory=list[MissingFile])
    complete: bool = True

    def add(self, picture: Picture | None, file: ProducedFile | None, inline_bytes: int) -> None:
        if picture is not None and len(picture.content) <= inline_bytes:
            url = picture.data_url()
            self.images.append(Image(url=url))
            if picture.for_models:
                self.urls.append(url)
        elif file is not None:
            self.images.append(Image(url=content_path(file)))

    def detailed_files(self) -> list[ExecutionFile]:
        """The files as `fumehood:execution` lists them."""
        return [self.details[file.file_id] for file in self.files]


@dataclass(frozen=True, slots=True)
class _PictureFile:
    """`picture` is None where it is too large to be carried around."""

    file: ProducedFile
    picture: Picture | None


class Gatherer:
    """For one call, or one command of it.

    limits: up to which size what files hold is sent. most: how many pictures there may be.
    contents_left: bytes of contents that may still be sent; None where the client has not asked for them.
    """

    def __init__(
        self,
        containers: Containers,
        container: Container,
        caller: Caller,
        *,
        limits: InlineLimits,
        most: int,
        contents_left: int | None = None,
    ) -> None:
        self._containers = containers
        self._container = container
        self._caller = caller
        self._inline_bytes = limits.file_bytes
        self._most = most
        self._contents_left = contents_left

    async def gather(self, figures: Sequence[Picture]) -> Produced:
        """The files that the container has found, with the figures beside them; pictures in the order of showing."""
        collected = await self._container.collect()
        records = collected.files
        produced = Produced(await aside(ITEM * len(records), _produced_files, records))
        digests = {record.id: record.blob for record in records if record.blob}
        produced.missing = [_missing_file(file) for file in collected.missing]
        produced.complete = collected.complete
        written: dict[str, _PictureFile] = {}
        for record, file in zip(records, produced.files, strict=True):
            if may_be_picture(record.path) and len(written) < self._most:
                await self._look_at(record, file, written)
        for figure in figures:
            # A file that was written and then shown is one picture.
            same = written.pop(_digest(figure.content), None)
            file = await self._saved(figure) if same is None else same.file
            if same is None and file is not None:
                produced.files.append(file)
                digests[file.file_id] = _digest(figure.content)
            produced.add(figure, file, self._inline_bytes)
        for found in list(written.values())[: max(0, self._most - len(figures))]:
            produced.add(found.picture, found.file, self._inline_bytes)
        contents = await self._contents(produced.files, digests)
        size = sum(map(len, contents.values())) + ITEM * len(produced.files)
        produced.details = await aside(size, _describe_files, produced.files, digests, contents)
        return produced

    async def _contents(self, files: Sequence[ProducedFile], kept: Mapping[str, str]) -> dict[str, bytes]:
        """What the files hold that are small enough, by id, in their order, until there is no more room."""
        contents: dict[str, bytes] = {}
        left = self._contents_left or 0
        for file in files:
            if not left or len(contents) >= _MOST_CONTENTS:
                break
            if file.file_id not in kept or file.bytes > min(self._inline_bytes, left):
                continue
            content = await self._read(file.file_id)
            if content is not None and len(content) == file.bytes:
                contents[file.file_id] = content
                left -= len(content)
        return contents

    async def _read(self, file_id: str) -> bytes | None:
        """The content of a file, or a little more than is sent of one; None if it cannot be read."""
        content = b""
        try:
            async with aclosing(self._containers.read(self._caller, self._container.id, file_id)) as pieces:
                async for piece in pieces:
                    content += piece
                    if len(content) > self._inline_bytes:
                        break
        except (ApiError, SandboxError):
            return None
        return content

    async def _look_at(
        self, record: ContainerFileRecord, file: ProducedFile, written: dict[str, _PictureFile]
    ) -> None:
        content = await self._read(record.id)
        if content is None:
            return
        mime = kind_of(content)
        if mime is None:
            return
        if len(content) > self._inline_bytes:
            written[record.blob or record.id] = _PictureFile(file, None)
        else:
            written[_digest(content)] = _PictureFile(file, Picture(mime, content))

    async def _saved(self, figure: Picture) -> ProducedFile | None:
        try:
            record = await self._container.save(f"{_FIGURE}{figure.suffix}", figure.content)
        except (ApiError, SandboxError):  # there is no room for it
            return None
        return produced_file(record)


def _produced_files(records: Sequence[ContainerFileRecord]) -> list[ProducedFile]:
    return [produced_file(record) for record in records]


def _describe_files(
    files: Sequence[ProducedFile], digests: Mapping[str, str], contents: Mapping[str, bytes]
) -> dict[str, ExecutionFile]:
    return {file.file_id: _describe_file(file, digests, contents) for file in files}


def _describe_file(
    file: ProducedFile, digests: Mapping[str, str], contents: Mapping[str, bytes]
) -> ExecutionFile:
    content = contents.get(file.file_id)
    return ExecutionFile(
        file_id=file.file_id,
        container_id=file.container_id,
        filename=file.filename,
        path=file.path,
        bytes=file.bytes,
        mime_type=media_type(file.filename).partition(";")[0],
        sha256=digests.get(file.file_id),
        content=None if content is None else base64.b64encode(content).decode(),
    )


def produced_file(record: ContainerFileRecord) -> ProducedFile:
    path = clean_name(f"{DATA_DIRECTORY}/{record.path}")
    return ProducedFile(
        file_id=record.id,
        container_id=record.container_id,
        filename=path.rpartition("/")[2],
        path=path,
        bytes=record.bytes,
    )


def _missing_file(file: FileEntry) -> MissingFile:
    path = clean_name(f"{DATA_DIRECTORY}/{file.path}")
    return MissingFile(filename=path.rpartition("/")[2], path=path, bytes=max(file.size, 0))


def named(files: Sequence[ProducedFile]) -> str:
    """What the model is told of them; nothing where there are none."""
    return f"Files: {in_words([file.path for file in files], _FILES_NAMED)}" if files else ""


def content_path(file: ProducedFile) -> str:
    """Where the gateway serves it."""
    return f"/v1/containers/{file.container_id}/files/{file.file_id}/content"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
