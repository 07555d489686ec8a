"""File types: accepted extensions, signatures and media types.

The extension of the name decides the type. If the first bytes identify the content, both must agree. docs/files.md
states the rule. Uploads of files and uploads into containers follow this one table.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from fumehood.protocol.name_sanitizing import sanitize_name
from fumehood.protocol.openai.api_errors import InvalidRequest

HEAD_BYTES = 4096
"""Bytes at the beginning of a file that the check needs."""

ANY_TYPE = "*"
OCTET_STREAM = "application/octet-stream"

_TEXT = "text/plain; charset=utf-8"
_OFFICE = "application/vnd.openxmlformats-officedocument."
_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")
# Control characters that do not occur in text of any common encoding.
_NON_TEXT_BYTES = bytes({*range(0x20), 0x7F} - {*b"\a\b\t\n\v\f\r\x1a\x1b"})


class FileType(NamedTuple):
    """The type of one extension.

    media_type: the Content-Type of a download.
    matches: whether content that begins with these bytes can be of this type.
    """

    media_type: str
    matches: Callable[[bytes], bool]


def _starts_with(*prefixes: bytes) -> Callable[[bytes], bool]:
    return lambda head: head.startswith(prefixes)


_is_zip = _starts_with(b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")
_is_compound = _starts_with(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1")
_is_png = _starts_with(b"\x89PNG\r\n\x1a\n")
_is_jpeg = _starts_with(b"\xff\xd8\xff")
_is_gif = _starts_with(b"GIF87a", b"GIF89a")


def _is_pdf(head: bytes) -> bool:
    return b"%PDF-" in head[:1024]


def _is_webp(head: bytes) -> bool:
    return head[:4] == b"RIFF" and head[8:12] == b"WEBP"


def _is_tar(head: bytes) -> bool:
    """Check the checksum of the first header; an empty archive consists of zero blocks."""
    header = head[:512]
    try:
        checksum = int(header[148:156].strip(b" \0") or b"-1", 8)
    except ValueError:
        return False
    return checksum == sum(header) - sum(header[148:156]) + 8 * 0x20 or (
        len(header) == 512 and not any(header)
    )


_is_gzip = _starts_with(b"\x1f\x8b")
_is_sqlite = _starts_with(b"SQLite format 3\0")
_is_arrow = _starts_with(b"ARROW1", b"FEA1")


def _is_zstd(head: bytes) -> bool:
    """A frame, or a skippable one before it."""
    return head[:4] == b"\x28\xb5\x2f\xfd" or (
        len(head) > 3 and head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5
    )


def _is_database(head: bytes) -> bool:
    return not head or _is_sqlite(head)  # a database without a table is an empty file


def _is_executable(head: bytes) -> bool:
    """ELF, Mach-O, WebAssembly or PE; text may begin with MZ, too."""
    return head.startswith(_EXECUTABLE_MAGIC) or (head[:2] == b"MZ" and b"\0" in head)


_EXECUTABLE_MAGIC = (
    b"\x7fELF",
    b"\xfe\xed\xfa",
    b"\xce\xfa\xed\xfe",
    b"\xcf\xfa\xed\xfe",
    b"\xca\xfe\xba\xbe",
    b"\0asm",
)
_PICTURES = {"image/png": _is_png, "image/jpeg": _is_jpeg, "image/gif": _is_gif, "image/webp": _is_webp}
_SIGNATURES = (
    _is_executable,
    *_PICTURES.values(),
    _starts_with(b"%PDF-"),
    _is_gzip,
    _is_zip,
    _is_compound,
)


def detect_image_type(head: bytes) -> str | None:
    """Return the media type of a picture that models accept, by its first bytes, or None."""
    return next((media_type for media_type, matches in _PICTURES.items() if matches(head)), None)


def looks_like_text(head: bytes) -> bool:
    """Whether content that begins with these bytes is probably text."""
    if head.startswith(_BYTE_ORDER_MARKS):
        return True
    return len(head.translate(None, _NON_TEXT_BYTES)) == len(head) and not any(
        matches(head) for matches in _SIGNATURES
    )


def _is_office(head: bytes) -> bool:
    return _is_zip(head) or _is_compound(head)  # the latter if it has a password


def _is_old_office(head: bytes) -> bool:
    return _is_compound(head) or looks_like_text(head)  # some programs write RTF or HTML under these names


def _is_pickle(head: bytes) -> bool:
    """Old pickle protocols have no signature: accept what has no other signature."""
    return not any(matches(head) for matches in _SIGNATURES)


def _is_not_executable(head: bytes) -> bool:
    return not _is_executable(head)


def _matches_anything(head: bytes) -> bool:
    del head
    return True


def _text_types(media_type: str, *extensions: str) -> dict[str, FileType]:
    return dict.fromkeys(extensions, FileType(media_type, looks_like_text))


_DEFAULT_TYPES: dict[str, FileType] = {
    **_text_types("text/x-c", "c", "h"),
    **_text_types("text/x-c++", "cpp", "hpp"),
    **_text_types(_TEXT, "bat", "cfg", "conf", "ini", "log", "r", "sql", "toml", "txt"),
    **_text_types("text/x-csharp", "cs"),
    **_text_types("text/css; charset=utf-8", "css"),
    **_text_types("text/csv; charset=utf-8", "csv"),
    **_text_types("text/x-golang", "go"),
    **_text_types("text/html; charset=utf-8", "htm", "html"),
    **_text_types("application/x-ipynb+json", "ipynb"),
    **_text_types("text/x-java", "java"),
    **_text_types("text/javascript; charset=utf-8", "js", "mjs", "jsx"),
    **_text_types("application/json", "json"),
    **_text_types("application/jsonl", "jsonl", "ndjson"),
    **_text_types("text/x-kotlin", "kt"),
    **_text_types("text/markdown; charset=utf-8", "markdown", "md"),
    **_text_types("text/x-php", "php"),
    **_text_types("text/x-python; charset=utf-8", "py"),
    **_text_types("text/x-ruby", "rb"),
    **_text_types("text/x-rust", "rs"),
    **_text_types("text/x-rst", "rst"),
    **_text_types("application/rtf", "rtf"),
    **_text_types("application/x-sh", "sh"),
    **_text_types("image/svg+xml", "svg"),
    **_text_types("text/x-swift", "swift"),
    **_text_types("text/x-tex", "tex"),
    **_text_types("application/typescript", "ts", "tsx"),
    **_text_types("text/tab-separated-values; charset=utf-8", "tsv"),
    **_text_types("application/xml", "xml"),
    **_text_types("application/yaml", "yaml", "yml"),
    "arrow": FileType("application/vnd.apache.arrow.file", _is_arrow),
    "bin": FileType(OCTET_STREAM, _is_not_executable),
    "bz2": FileType("application/x-bzip2", _starts_with(b"BZh")),
    "db": FileType("application/vnd.sqlite3", _is_database),
    "doc": FileType("application/msword", _is_old_office),
    "docx": FileType(f"{_OFFICE}wordprocessingml.document", _is_office),
    "feather": FileType("application/vnd.apache.arrow.file", _is_arrow),
    "gif": FileType("image/gif", _is_gif),
    "gz": FileType("application/gzip", _is_gzip),
    "jpeg": FileType("image/jpeg", _is_jpeg),
    "jpg": FileType("image/jpeg", _is_jpeg),
    "npy": FileType(OCTET_STREAM, _starts_with(b"\x93NUMPY")),
    "npz": FileType(OCTET_STREAM, _is_zip),
    "odt": FileType("application/vnd.oasis.opendocument.text", _is_zip),
    "parquet": FileType("application/vnd.apache.parquet", _starts_with(b"PAR1", b"PARE")),
    "pdf": FileType("application/pdf", _is_pdf),
    "pkl": FileType(OCTET_STREAM, _is_pickle),
    "png": FileType("image/png", _is_png),
    "ppt": FileType("application/vnd.ms-powerpoint", _is_old_office),
    "pptx": FileType(f"{_OFFICE}presentationml.presentation", _is_office),
    "sqlite": FileType("application/vnd.sqlite3", _is_database),
    "sqlite3": FileType("application/vnd.sqlite3", _is_database),
    "tar": FileType("application/x-tar", _is_tar),
    "tgz": FileType("application/gzip", _is_gzip),
    "webp": FileType("image/webp", _is_webp),
    "xls": FileType("application/vnd.ms-excel", _is_old_office),
    "xlsx": FileType(f"{_OFFICE}spreadsheetml.sheet", _is_office),
    "zip": FileType("application/zip", _is_zip),
    "zst": FileType("application/zstd", _is_zstd),
}
# Further types that code may write or an operator may allow.
_EXTRA_TYPES: dict[str, FileType] = {
    "mp3": FileType("audio/mpeg", _matches_anything),
    "mp4": FileType("video/mp4", _matches_anything),
    "wav": FileType("audio/wav", _starts_with(b"RIFF")),
}
_ALL_TYPES = _DEFAULT_TYPES | _EXTRA_TYPES

# Types whose check accepts nearly everything.
_UNDETECTABLE = frozenset({"bin", "mp3", "mp4", "pkl"})

DEFAULT_ACCEPTED = frozenset(_DEFAULT_TYPES)
"""The extensions that are accepted by default."""


def file_extension(name: str) -> str:
    """Return the lower-case extension without the dot, empty if there is none."""
    stem, dot, extension = name.rpartition("/")[2].rpartition(".")
    return extension.lower() if dot and stem else ""


def media_type_for_name(name: str) -> str:
    """Return the media type of a file name; unknown types are application/octet-stream."""
    known = _ALL_TYPES.get(file_extension(name))
    return OCTET_STREAM if known is None else known.media_type


class UploadFileTypes:
    """The file types that may be uploaded.

    extra_extensions: besides the default ones; `*` accepts every content under every name.
    """

    def __init__(self, extra_extensions: Iterable[str] = ()) -> None:
        added = {each.lower().removeprefix(".") for each in extra_extensions}
        self._accepts_everything = ANY_TYPE in added
        self._accepted = DEFAULT_ACCEPTED | added

    def check(self, name: str, head: bytes, *, param: str = "file") -> None:
        """Check a name and the first `HEAD_BYTES` of the content. Raises InvalidRequest."""
        if self._accepts_everything:
            return
        extension = file_extension(name)
        if not extension:
            matches = looks_like_text(head) or any(
                _ALL_TYPES[each].matches(head) for each in self._detectable_extensions()
            )
        elif extension not in self._accepted:
            raise _unsupported_file_error(
                f"Files of type '.{sanitize_name(extension, 40)}' are not accepted. Supported are: "
                f"{', '.join(sorted(self._accepted))}.",
                param,
            )
        else:
            matches = extension not in _ALL_TYPES or _ALL_TYPES[extension].matches(head)
        if not matches:
            expected = f"a {extension} file" if extension else "of an accepted type"
            raise _unsupported_file_error(
                f"The content of '{sanitize_name(name, 80)}' is not {expected}.", param
            )

    def _detectable_extensions(self) -> Iterable[str]:
        return (each for each in self._accepted if each in _ALL_TYPES and each not in _UNDETECTABLE)


def _unsupported_file_error(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="unsupported_file")
