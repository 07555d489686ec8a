"""What a call of code leaves behind: files, and pictures among them; imports `interfaces`, what is below, siblings."""

import hashlib
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from fumehood.aside import ITEM, aside
from fumehood.interfaces import Caller, Container, Containers
from fumehood.protocol.containers import DATA_DIRECTORY, ContainerFileRecord
from fumehood.protocol.errors import ApiError
from fumehood.protocol.items import Image, ProducedFile
from fumehood.protocol.names import clean_name, in_words
from fumehood.protocol.sandbox_errors import SandboxError
from fumehood.tools.pictures import Picture, kind_of, may_be_picture

_FIGURE = "figure"
_FILES_NAMED = 20


@dataclass(slots=True)
class Produced:
    """What a call has left: files and pictures.

    files: every file, the figures that were shown last. images: for clients. urls: data: URLs for models that see.
    """

    files: list[ProducedFile] = field(default_factory=list[ProducedFile])
    images: list[Image] = field(default_factory=list[Image])
    urls: list[str] = field(default_factory=list[str])

    def add(self, picture: Picture | None, file: ProducedFile | None, inline_bytes: int) -> None:
        if picture is not None and len(picture.content) <= inline_bytes:
            url = picture.data_url()
            self.images.append(Image(url=url))
            if picture.for_models:
                self.urls.append(url)
        elif file is not None:
            self.images.append(Image(url=content_path(file)))


@dataclass(frozen=True, slots=True)
class _PictureFile:
    """`picture` is None where it is too large to be carried around."""

    file: ProducedFile
    picture: Picture | None


class Gatherer:
    """For one call: `inline_bytes` is the size up to which a picture is a data: URL, `most` how many there may be."""

    def __init__(
        self, containers: Containers, container: Container, caller: Caller, *, inline_bytes: int, most: int
    ) -> None:
        self._containers = containers
        self._container = container
        self._caller = caller
        self._inline_bytes = inline_bytes
        self._most = most

    async def gather(self, figures: Sequence[Picture]) -> Produced:
        """The files that the container has found, with the figures beside them; pictures in the order of showing."""
        records = await self._container.collect()
        produced = Produced(await aside(ITEM * len(records), _produced_files, records))
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
            produced.add(figure, file, self._inline_bytes)
        for found in list(written.values())[: max(0, self._most - len(figures))]:
            produced.add(found.picture, found.file, self._inline_bytes)
        return produced

    async def _look_at(
        self, record: ContainerFileRecord, file: ProducedFile, written: dict[str, _PictureFile]
    ) -> None:
        content = b""
        try:
            async with aclosing(self._containers.read(self._caller, self._container.id, record.id)) as pieces:
                async for piece in pieces:
                    content += piece
                    if len(content) > self._inline_bytes:
                        break
        except (ApiError, SandboxError):
            return
        mime = kind_of(content)
        if mime is None:
            return
        if len(content) > self._inline_bytes:
            written[record.id] = _PictureFile(file, None)
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


def produced_file(record: ContainerFileRecord) -> ProducedFile:
    path = clean_name(f"{DATA_DIRECTORY}/{record.path}")
    return ProducedFile(
        file_id=record.id,
        container_id=record.container_id,
        filename=path.rpartition("/")[2],
        path=path,
        bytes=record.bytes,
    )


def named(files: Sequence[ProducedFile]) -> str:
    """What the model is told of them; nothing where there are none."""
    return f"Files: {in_words([file.path for file in files], _FILES_NAMED)}" if files else ""


def content_path(file: ProducedFile) -> str:
    """Where the gateway serves it."""
    return f"/v1/containers/{file.container_id}/files/{file.file_id}/content"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
