"""Files and pictures in the input of a prompt."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, cast

from fumehood.client.dbc import require
from fumehood.client.type_validation import require_field_types

type ImageDetail = Literal["auto", "low", "high"]

_IMAGE_SIGNATURES = (
    ("image/png", b"\x89PNG\r\n\x1a\n"),
    ("image/jpeg", b"\xff\xd8\xff"),
    ("image/gif", b"GIF8"),
)


@dataclass(frozen=True)
class _Attachment:
    """One source of content: `path`, `content`, `file_id` or `url`.

    path: a local file, read at once; None afterwards. content: the file itself. file_id: an upload at the provider.
    url: an address that the provider fetches.
    """

    path: "os.PathLike[str] | str | None" = None
    content: bytes | None = field(default=None, repr=False)
    file_id: str | None = None
    url: str | None = None

    def __post_init__(self) -> None:
        require_field_types(self)
        kind = type(self).__name__
        sources = ("path", "content", "file_id", "url")
        given = [name for name in sources if getattr(self, name) is not None]
        require(
            len(given) == 1,
            f"{kind} has {' and '.join(given) or 'no source'}; give one of path, content, file_id and url.",
        )
        require(self.file_id is None or self.file_id.strip(), f"{kind} has an empty file_id.")
        require(
            self.url is None or self.url.startswith(("https://", "http://")),
            f"{kind} has the url {self.url!r}; it has to begin with http:// or https://.",
        )
        if self.path is not None:
            self._read_path(self.path)

    def _read_path(self, path: "os.PathLike[str] | str") -> None:
        try:
            with open(path, "rb") as file:
                content = file.read()
        except (OSError, ValueError) as error:
            require(
                False, f"The file {str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}."
            )
            raise
        object.__setattr__(self, "content", content)
        object.__setattr__(self, "path", None)

    def _encode_content(self, media_type: str) -> str:
        import base64  # here, because few prompts need it

        return f"data:{media_type};base64,{base64.b64encode(self.content or b'').decode()}"


@dataclass(frozen=True)
class InputFile(_Attachment):
    """A file for the model: `InputFile(path="sales.csv")`. Code finds it in its container under its name.

    filename: by default the last part of the path; needed with `content`, since its ending says what it is.
    """

    filename: str | None = None

    def __post_init__(self) -> None:
        path = self.path
        super().__post_init__()
        if path is not None and self.filename is None:
            object.__setattr__(self, "filename", os.path.basename(path))
        require(
            self.content is None or (self.filename or "").strip(),
            "InputFile has content and no filename; its ending says what it is.",
        )
        require(
            self.content is not None or self.filename is None,
            "InputFile has a filename, which only path and content can have: an upload and a URL have their own.",
        )

    def __str__(self) -> str:
        return self.filename or self.file_id or _last_part(self.url)

    def build_part(self) -> dict[str, Any]:
        """Return the content part that is sent."""
        if self.file_id is not None:
            return {"type": "input_file", "file_id": self.file_id}
        if self.url is not None:
            return {"type": "input_file", "file_url": self.url}
        media_type = _guess_media_type(self.filename or "")
        return {
            "type": "input_file",
            "filename": self.filename,
            "file_data": self._encode_content(media_type),
        }


@dataclass(frozen=True)
class InputImage(_Attachment):
    """A picture for the model: `InputImage(path="plot.png")`. PNG, JPEG, GIF or WebP, by its content.

    detail: how closely the model looks at it.
    """

    detail: ImageDetail = "auto"

    def __post_init__(self) -> None:
        path = self.path
        super().__post_init__()
        require(
            self.content is None or _detect_image_type(self.content),
            f"{f'The file {str(path)!r}' if path is not None else 'The content of InputImage'} is no PNG, JPEG, GIF "
            "or WebP; include it as InputFile.",
        )

    def __str__(self) -> str:
        return self.file_id or _last_part(self.url)

    def build_part(self) -> dict[str, Any]:
        """Return the content part that is sent."""
        part: dict[str, Any] = {"type": "input_image", "detail": self.detail}
        if self.file_id is not None:
            return {**part, "file_id": self.file_id}
        if self.url is not None:
            return {**part, "image_url": self.url}
        return {**part, "image_url": self._encode_content(_detect_image_type(self.content or b"") or "")}


type Attachment = InputFile | InputImage


def find_attachments(params: object) -> Iterator[Attachment]:
    """Yield the files and pictures in the fields of a dataclass, also those in lists and tuples."""
    if params is None or not is_dataclass(params):
        return
    for one in fields(params):
        value: object = getattr(params, one.name)
        several = cast(tuple[object, ...], value) if isinstance(value, list | tuple) else (value,)
        yield from (each for each in several if isinstance(each, InputFile | InputImage))


def _detect_image_type(content: bytes) -> str | None:
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for kind, start in _IMAGE_SIGNATURES if content.startswith(start)), None)


def _guess_media_type(filename: str) -> str:
    import mimetypes

    # Without the host's own tables, so the same everywhere.
    return mimetypes.MimeTypes().guess_type(filename)[0] or "application/octet-stream"


def _last_part(url: str | None) -> str:
    from urllib.parse import urlsplit

    return urlsplit(url or "").path.rpartition("/")[2] or url or "the picture"
