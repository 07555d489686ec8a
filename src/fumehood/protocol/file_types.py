"""Types of files: which are accepted, what their content looks like, what they are called; imports siblings.

A type is known by the end of the name. What the content is, its first bytes tell, where anything does: then both have
to agree. docs/files.md has the rule in words.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.names import clean_name

HEAD_BYTES = 4096
"""So many of the first bytes are enough to look at."""

EVERYTHING = "*"
BINARY = "application/octet-stream"

_TEXT = "text/plain; charset=utf-8"
_OFFICE = "application/vnd.openxmlformats-officedocument."
_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")
# Control characters that no text has, in any of the usual encodings.
_NOT_IN_TEXT = bytes({*range(0x20), 0x7F} - {*b"\a\b\t\n\v\f\r\x1a\x1b"})


class FileType(NamedTuple):
    """What files of one extension hold.

    media_type: what a download is called.
    fits: whether content that begins with these bytes can be of this type.
    """

    media_type: str
    fits: Callable[[bytes], bool]


def _begins(*marks: bytes) -> Callable[[bytes], bool]:
    return lambda head: head.startswith(marks)


_is_zip = _begins(b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")
_is_compound = _begins(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1")
_is_png = _begins(b"\x89PNG\r\n\x1a\n")
_is_jpeg = _begins(b"\xff\xd8\xff")
_is_gif = _begins(b"GIF87a", b"GIF89a")


def _is_pdf(head: bytes) -> bool:
    return b"%PDF-" in head[:1024]


def _is_webp(head: bytes) -> bool:
    return head[:4] == b"RIFF" and head[8:12] == b"WEBP"


def _is_tar(head: bytes) -> bool:
    """By the sum of its first header; an archive of nothing is empty blocks."""
    header = head[:512]
    try:
        told = int(header[148:156].strip(b" \0") or b"-1", 8)
    except ValueError:
        return False
    return told == sum(header) - sum(header[148:156]) + 8 * 0x20 or (len(header) == 512 and not any(header))


def _is_program(head: bytes) -> bool:
    """For Linux, macOS, the web, or Windows; text may begin with the last one's letters."""
    return head.startswith(_PROGRAMS) or (head[:2] == b"MZ" and b"\0" in head)


_PROGRAMS = (
    b"\x7fELF",
    b"\xfe\xed\xfa",
    b"\xce\xfa\xed\xfe",
    b"\xcf\xfa\xed\xfe",
    b"\xca\xfe\xba\xbe",
    b"\0asm",
)
_PICTURES = {"image/png": _is_png, "image/jpeg": _is_jpeg, "image/gif": _is_gif, "image/webp": _is_webp}
_SIGNATURES = (
    _is_program,
    *_PICTURES.values(),
    _begins(b"%PDF-"),
    _begins(b"\x1f\x8b"),
    _is_zip,
    _is_compound,
)


def picture_type(head: bytes) -> str | None:
    """The type of a picture that models take, by its first bytes; None for anything else."""
    return next((media_type for media_type, is_it in _PICTURES.items() if is_it(head)), None)


def is_text(head: bytes) -> bool:
    """Whether content that begins so is text, as far as can be told."""
    if head.startswith(_BYTE_ORDER_MARKS):
        return True
    return len(head.translate(None, _NOT_IN_TEXT)) == len(head) and not any(
        is_it(head) for is_it in _SIGNATURES
    )


def _is_office(head: bytes) -> bool:
    return _is_zip(head) or _is_compound(head)  # with a password it is the latter


def _is_old_office(head: bytes) -> bool:
    return _is_compound(head) or is_text(head)  # some programs write RTF or HTML under these names


def _is_pickle(head: bytes) -> bool:
    """The first protocols begin with anything, so it is one unless it is something else."""
    return not any(is_it(head) for is_it in _SIGNATURES)


def _anything(head: bytes) -> bool:
    del head
    return True


def _texts(media_type: str, *extensions: str) -> dict[str, FileType]:
    return dict.fromkeys(extensions, FileType(media_type, is_text))


_TYPES: dict[str, FileType] = {
    **_texts("text/x-c", "c", "h"),
    **_texts("text/x-c++", "cpp", "hpp"),
    **_texts(_TEXT, "bat", "cfg", "conf", "ini", "log", "r", "sql", "toml", "txt"),
    **_texts("text/x-csharp", "cs"),
    **_texts("text/css; charset=utf-8", "css"),
    **_texts("text/csv; charset=utf-8", "csv"),
    **_texts("text/x-golang", "go"),
    **_texts("text/html; charset=utf-8", "htm", "html"),
    **_texts("application/x-ipynb+json", "ipynb"),
    **_texts("text/x-java", "java"),
    **_texts("text/javascript; charset=utf-8", "js", "mjs", "jsx"),
    **_texts("application/json", "json"),
    **_texts("application/jsonl", "jsonl"),
    **_texts("text/x-kotlin", "kt"),
    **_texts("text/markdown; charset=utf-8", "markdown", "md"),
    **_texts("text/x-php", "php"),
    **_texts("text/x-python; charset=utf-8", "py"),
    **_texts("text/x-ruby", "rb"),
    **_texts("text/x-rust", "rs"),
    **_texts("text/x-rst", "rst"),
    **_texts("application/rtf", "rtf"),
    **_texts("application/x-sh", "sh"),
    **_texts("image/svg+xml", "svg"),
    **_texts("text/x-swift", "swift"),
    **_texts("text/x-tex", "tex"),
    **_texts("application/typescript", "ts", "tsx"),
    **_texts("text/tab-separated-values; charset=utf-8", "tsv"),
    **_texts("application/xml", "xml"),
    **_texts("application/yaml", "yaml", "yml"),
    "doc": FileType("application/msword", _is_old_office),
    "docx": FileType(f"{_OFFICE}wordprocessingml.document", _is_office),
    "gif": FileType("image/gif", _is_gif),
    "jpeg": FileType("image/jpeg", _is_jpeg),
    "jpg": FileType("image/jpeg", _is_jpeg),
    "odt": FileType("application/vnd.oasis.opendocument.text", _is_zip),
    "pdf": FileType("application/pdf", _is_pdf),
    "pkl": FileType(BINARY, _is_pickle),
    "png": FileType("image/png", _is_png),
    "ppt": FileType("application/vnd.ms-powerpoint", _is_old_office),
    "pptx": FileType(f"{_OFFICE}presentationml.presentation", _is_office),
    "tar": FileType("application/x-tar", _is_tar),
    "webp": FileType("image/webp", _is_webp),
    "xls": FileType("application/vnd.ms-excel", _is_old_office),
    "xlsx": FileType(f"{_OFFICE}spreadsheetml.sheet", _is_office),
    "zip": FileType("application/zip", _is_zip),
}
# What code may write, or an operator may allow, besides.
_OTHERS: dict[str, FileType] = {
    "bz2": FileType("application/x-bzip2", _begins(b"BZh")),
    "gz": FileType("application/gzip", _begins(b"\x1f\x8b")),
    "mp3": FileType("audio/mpeg", _anything),
    "mp4": FileType("video/mp4", _anything),
    "npy": FileType(BINARY, _begins(b"\x93NUMPY")),
    "npz": FileType(BINARY, _is_zip),
    "parquet": FileType("application/vnd.apache.parquet", _begins(b"PAR1")),
    "sqlite": FileType("application/vnd.sqlite3", _begins(b"SQLite format 3\0")),
    "tgz": FileType("application/gzip", _begins(b"\x1f\x8b")),
    "wav": FileType("audio/wav", _begins(b"RIFF")),
}
_KNOWN = _TYPES | _OTHERS

ACCEPTED = frozenset(_TYPES)
"""The types that are accepted where nothing else is said."""


def extension(name: str) -> str:
    """The end of a name after its last point, in small letters; empty where there is none."""
    stem, point, end = name.rpartition("/")[2].rpartition(".")
    return end.lower() if point and stem else ""


def media_type(name: str) -> str:
    """The same on every host; what is not known is bytes."""
    known = _KNOWN.get(extension(name))
    return BINARY if known is None else known.media_type


class AcceptedTypes:
    """Which files may be uploaded.

    more: extensions besides the usual ones; `*` stands for every content under every name.
    """

    def __init__(self, more: Iterable[str] = ()) -> None:
        added = {each.lower().removeprefix(".") for each in more}
        self._everything = EVERYTHING in added
        self._accepted = ACCEPTED | added

    def check(self, name: str, head: bytes, *, param: str = "file") -> None:
        """Look at a name and at the first `HEAD_BYTES` of the content, or all of it; raises InvalidRequest."""
        if self._everything:
            return
        end = extension(name)
        if not end:
            fits = is_text(head) or any(_KNOWN[each].fits(head) for each in self._told_by_content())
        elif end not in self._accepted:
            raise _unsupported(
                f"Files of type '.{clean_name(end, 40)}' are not accepted. Supported are: "
                f"{', '.join(sorted(self._accepted))}.",
                param,
            )
        else:
            fits = end not in _KNOWN or _KNOWN[end].fits(head)
        if not fits:
            what = f"no {end} file" if end else "of no type that is accepted"
            raise _unsupported(f"What '{clean_name(name, 80)}' holds is {what}.", param)

    def _told_by_content(self) -> Iterable[str]:
        return (each for each in self._accepted if each in _KNOWN and each not in ("pkl", "mp3", "mp4"))


def _unsupported(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="unsupported_file")
