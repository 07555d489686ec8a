"""Collects the files and images that a call produced."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from fumehood.cpu_worker import ITEM_COST_BYTES, run_in_worker
from fumehood.interfaces import Caller, Container, ContainerService
from fumehood.protocol.file_types import media_type_for_name
from fumehood.protocol.name_sanitizing import join_names, sanitize_name
from fumehood.protocol.openai.api_errors import ApiError, NotFound
from fumehood.protocol.openai.container_objects import DATA_DIRECTORY, ContainerFileRecord
from fumehood.protocol.openai.items import (
    CodeInterpreterImage,
    ExecutionDetailsFile,
    ProducedFile,
    UnavailableProducedFile,
)
from fumehood.protocol.sandbox.sandbox_errors import SandboxError
from fumehood.protocol.sandbox.sandbox_messages import FileEntry
from fumehood.tools.images import DecodedImage, detect_media_type, has_image_suffix

_FIGURE_NAME = "figure"
_MAX_NAMED_FILES = 20
_MAX_CONTENTS = 100  # files of one call whose content is sent


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineLimits:
    """How much content of produced files is sent inside items.

    file_bytes: the largest file; larger images are sent as URLs of container files.
    total_bytes: all contents of one call, without the images in `outputs`.
    """

    file_bytes: int = 1 << 20
    total_bytes: int = 4 << 20


@dataclass(slots=True)
class ProducedFiles:
    """The files and images of a call.

    files: all files, saved figures last. images: for clients. model_image_urls: data: URLs for models.
    details: of each file, by id.
    missing: files that could not be fetched. is_complete: whether there are none.
    """

    files: list[ProducedFile] = field(default_factory=list[ProducedFile])
    images: list[CodeInterpreterImage] = field(default_factory=list[CodeInterpreterImage])
    model_image_urls: list[str] = field(default_factory=list[str])
    details: dict[str, ExecutionDetailsFile] = field(default_factory=dict[str, ExecutionDetailsFile])
    missing: list[UnavailableProducedFile] = field(default_factory=list[UnavailableProducedFile])
    is_complete: bool = True

    def add_image(self, image: DecodedImage | None, file: ProducedFile | None, inline_bytes: int) -> None:
        if image is not None and len(image.content) <= inline_bytes:
            url = image.to_data_url()
            self.images.append(CodeInterpreterImage(url=url))
            if image.is_viewable_by_models:
                self.model_image_urls.append(url)
        elif file is not None:
            self.images.append(CodeInterpreterImage(url=make_content_url(file)))

    def list_details(self) -> list[ExecutionDetailsFile]:
        """The files as `fumehood:execution` lists them."""
        return [self.details[file.file_id] for file in self.files]


@dataclass(frozen=True, slots=True)
class _ImageFile:
    """An image that code wrote; `image` is None if it is too large to be sent inline."""

    file: ProducedFile
    image: DecodedImage | None


class ProducedFileCollector:
    """Collects the files of one call or command.

    content_budget: bytes of file contents that may still be sent; None if the client did not ask for contents.
    """

    def __init__(
        self,
        containers: ContainerService,
        container: Container,
        caller: Caller,
        *,
        limits: InlineLimits,
        max_images: int,
        content_budget: int | None = None,
    ) -> None:
        self._containers = containers
        self._container = container
        self._caller = caller
        self._inline_bytes = limits.file_bytes
        self._max_images = max_images
        self._content_budget = content_budget

    async def collect(self, figures: Sequence[DecodedImage]) -> ProducedFiles:
        """Collect new files of the container and save the displayed figures; images in display order."""
        collected = await self._container.collect_files()
        records = collected.files
        produced = ProducedFiles(
            await run_in_worker(ITEM_COST_BYTES * len(records), _to_produced_files, records)
        )
        digests = {record.id: record.blob for record in records if record.blob}
        produced.missing = [_to_missing_file(file) for file in collected.missing]
        produced.is_complete = collected.is_complete
        written: dict[str, _ImageFile] = {}
        for record, file in zip(records, produced.files, strict=True):
            if has_image_suffix(record.path) and len(written) < self._max_images:
                await self._detect_image(record, file, written)
        for figure in figures:
            # A file that is written and then displayed is one image.
            same = written.pop(_hash_content(figure.content), None)
            file = await self._save_figure(figure) if same is None else same.file
            if same is None and file is not None:
                produced.files.append(file)
                digests[file.file_id] = _hash_content(figure.content)
            produced.add_image(figure, file, self._inline_bytes)
        for image_file in list(written.values())[: max(0, self._max_images - len(figures))]:
            produced.add_image(image_file.image, image_file.file, self._inline_bytes)
        contents = await self._read_contents(produced.files, digests)
        size = sum(map(len, contents.values())) + ITEM_COST_BYTES * len(produced.files)
        produced.details = await run_in_worker(size, _describe_files, produced.files, digests, contents)
        return produced

    async def _read_contents(
        self, files: Sequence[ProducedFile], digests: Mapping[str, str]
    ) -> dict[str, bytes]:
        """Read the contents of small files, by id, in order, until the budget is used up."""
        contents: dict[str, bytes] = {}
        left = self._content_budget or 0
        for file in files:
            if not left or len(contents) >= _MAX_CONTENTS:
                break
            if file.file_id not in digests or file.bytes > min(self._inline_bytes, left):
                continue
            content = await self._read(file.file_id)
            if content is not None and len(content) == file.bytes:
                contents[file.file_id] = content
                left -= len(content)
        return contents

    async def _read(self, file_id: str) -> bytes | None:
        """Read a file, at most a little more than the inline limit; None if it cannot be read."""
        content = b""
        try:
            async with aclosing(
                self._containers.read_file(self._caller, self._container.id, file_id)
            ) as chunks:
                async for chunk in chunks:
                    content += chunk
                    if len(content) > self._inline_bytes:
                        break
        except (ApiError, SandboxError):
            return None
        return content

    async def _detect_image(
        self, record: ContainerFileRecord, file: ProducedFile, written: dict[str, _ImageFile]
    ) -> None:
        content = await self._read(record.id)
        if content is None:
            return
        mime = detect_media_type(content)
        if mime is None:
            return
        if len(content) > self._inline_bytes:
            written[record.blob or record.id] = _ImageFile(file, None)
        else:
            written[_hash_content(content)] = _ImageFile(file, DecodedImage(mime, content))

    async def _save_figure(self, figure: DecodedImage) -> ProducedFile | None:
        try:
            record = await self._container.save_file(f"{_FIGURE_NAME}{figure.suffix}", figure.content)
        except (ApiError, SandboxError):  # for example, the container is full
            return None
        return to_produced_file(record)


def _to_produced_files(records: Sequence[ContainerFileRecord]) -> list[ProducedFile]:
    return [to_produced_file(record) for record in records]


def _describe_files(
    files: Sequence[ProducedFile], digests: Mapping[str, str], contents: Mapping[str, bytes]
) -> dict[str, ExecutionDetailsFile]:
    return {file.file_id: _describe_file(file, digests, contents) for file in files}


def _describe_file(
    file: ProducedFile, digests: Mapping[str, str], contents: Mapping[str, bytes]
) -> ExecutionDetailsFile:
    content = contents.get(file.file_id)
    return ExecutionDetailsFile(
        file_id=file.file_id,
        container_id=file.container_id,
        filename=file.filename,
        path=file.path,
        bytes=file.bytes,
        mime_type=media_type_for_name(file.filename).partition(";")[0],
        sha256=digests.get(file.file_id),
        content=None if content is None else base64.b64encode(content).decode(),
    )


def to_produced_file(record: ContainerFileRecord) -> ProducedFile:
    path = sanitize_name(f"{DATA_DIRECTORY}/{record.path}")
    return ProducedFile(
        file_id=record.id,
        container_id=record.container_id,
        filename=path.rpartition("/")[2],
        path=path,
        bytes=record.bytes,
    )


async def list_existing_files(
    containers: ContainerService, caller: Caller, container_id: str
) -> Sequence[ContainerFileRecord]:
    """All files of a container; none before it is created or after it expired."""
    try:
        return await containers.list_files(caller, container_id)
    except NotFound:
        return ()


def _to_missing_file(file: FileEntry) -> UnavailableProducedFile:
    path = sanitize_name(f"{DATA_DIRECTORY}/{file.path}")
    return UnavailableProducedFile(filename=path.rpartition("/")[2], path=path, bytes=max(file.size, 0))


def describe_files(files: Sequence[ProducedFile]) -> str:
    """List the files for the model; empty if there are none."""
    return f"Files: {join_names([file.path for file in files], _MAX_NAMED_FILES)}" if files else ""


def make_content_url(file: ProducedFile) -> str:
    """The path of the file's content in the gateway's API."""
    return f"/v1/containers/{file.container_id}/files/{file.file_id}/content"


def _hash_content(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
