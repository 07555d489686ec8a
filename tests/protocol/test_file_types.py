"""What is accepted by name and content."""

import bz2
import gzip
import io
import pickle
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from fumehood.protocol.file_types import (
    DEFAULT_ACCEPTED,
    HEAD_BYTES,
    UploadFileTypes,
    file_extension,
    media_type_for_name,
)
from fumehood.protocol.openai.api_errors import InvalidRequest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "files.md"


def _tar(*names: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    return packed.getvalue()


def _zip() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a", "b")
    return packed.getvalue()


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
JPEG = b"\xff\xd8\xff\xe0\0\x10JFIF\0"
ELF = b"\x7fELF\2\1\1" + bytes(60)
EXE = b"MZ\x90\0\3\0\0\0"
COMPOUND = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(60)
ZIP = _zip()


def accepts(name: str, content: bytes, *more: str) -> bool:
    try:
        UploadFileTypes(more).check(name, content[:HEAD_BYTES])
    except InvalidRequest as refused:
        return (refused.param, refused.wire_code) != ("file", "unsupported_file")
    return True


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b""),
        ("a.csv", "größe;preis\n".encode("cp1252")),
        ("a.csv", b"MZ,1\nMZ,2\n"),
        ("a.md", "naïve".encode("utf-16")),
        ("a.py", b"#!/usr/bin/python\n\x0c\n"),
        ("a.json", b'\xef\xbb\xbf{"a": 1}'),
        ("a.svg", b"<svg/>"),
        ("A.PNG", PNG),
        ("a.jpg", JPEG),
        ("a.webp", b"RIFF\x24\0\0\0WEBPVP8 "),
        ("a.gif", b"GIF89a\1\0"),
        ("a.pdf", b"junk\n%PDF-1.7\n%\xe2\xe3\xcf\xd3"),
        ("a.zip", ZIP),
        ("a.xlsx", ZIP),
        ("a.xlsx", COMPOUND),
        ("a.doc", COMPOUND),
        ("a.doc", b"{\\rtf1 hello}"),
        ("a.tar", _tar("x")),
        ("a.tar", _tar()),
        ("a.pkl", pickle.dumps({"a": 1})),
        ("a.pkl", pickle.dumps({"a": 1}, protocol=0)),
        ("upload", b"text"),
        ("upload", PNG),
        ("upload", ZIP),
        (".bashrc", b"alias"),
        ("dir.d/Makefile", b"all:\n\ttrue\n"),
        ("a.parquet", b"PAR1\x15\4"),
        ("a.feather", b"ARROW1\0\0"),
        ("a.feather", b"FEA1\0\0"),
        ("a.arrow", b"ARROW1\0\0"),
        ("a.db", b"SQLite format 3\0\x10"),
        ("a.sqlite", b""),
        ("a.sqlite3", b"SQLite format 3\0\x10"),
        ("a.tsv", b"a\tb\n"),
        ("a.jsonl", b"{}\n"),
        ("a.ndjson", b"{}\n"),
        ("a.csv.gz", gzip.compress(b"1", mtime=0)),
        ("a.tgz", gzip.compress(b"1", mtime=0)),
        ("a.json.zst", b"\x28\xb5\x2f\xfd\0"),
        ("a.zst", b"\x50\x2a\x4d\x18\0"),
        ("a.bz2", bz2.compress(b"1")),
        ("a.npy", b"\x93NUMPY\1"),
        ("a.npz", ZIP),
        ("a.bin", b"\0\1\2"),
        ("a.toml", b"[a]\n"),
        ("a.sql", b"select 1;\n"),
        ("a.log", b"started\n"),
        ("upload", b"PAR1\x15\4"),
        ("upload", gzip.compress(b"1", mtime=0)),
    ],
)
def test_what_is_accepted(name: str, content: bytes) -> None:
    assert accepts(name, content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.exe", EXE),
        ("a.so", ELF),
        *(
            (f"a.{each}", b"text")
            for each in ("parquet", "feather", "db", "sqlite", "gz", "zst", "npy", "bz2")
        ),
        ("a.bin", ELF),
        ("a.hdf", b"\x89HDF"),
        ("a.txt.exe", b"text"),
        ("a.", b"\0"),
        *((f"a.{each}", ELF) for each in ("txt", "png", "zip", "docx", "doc", "tar", "pkl", "pdf", "svg")),
        *((f"a.{each}", EXE) for each in ("py", "pkl", "csv")),
        ("a.txt", PNG),
        ("a.txt", b"%PDF-1.7 text"),
        ("a.csv", ZIP),
        ("a.jpg", PNG),
        ("a.png", b""),
        ("a.tar", ZIP),
        ("a.zip", _tar("x")),
        ("a.pkl", PNG),
        ("a.json", b'{"a": "\0"}'),
        ("upload", ELF),
        ("upload", EXE),
        ("upload", b"\1\2\3\4"),
    ],
)
def test_what_is_refused(name: str, content: bytes) -> None:
    assert not accepts(name, content)


def test_more_may_be_accepted() -> None:
    assert accepts("a.wav", b"RIFF", ".Wav")
    assert not accepts("a.wav", b"text", "wav"), "what is known is looked at"
    assert accepts("a.dat", ELF, "dat"), "what is not known is not"
    assert not accepts("a.exe", EXE, "dat")
    assert accepts("a.exe", EXE, "*")
    assert accepts("upload", ELF, "*")


def test_a_refusal_says_what_is_accepted() -> None:
    with pytest.raises(InvalidRequest) as refused:
        UploadFileTypes().check("a.e\u202exe", b"")
    assert "'.e\ufffdxe'" in refused.value.message
    assert "csv" in refused.value.message


def test_media_types() -> None:
    assert media_type_for_name("a.CSV") == "text/csv; charset=utf-8"
    assert media_type_for_name("a.b/c") == media_type_for_name("a.unknown") == "application/octet-stream"
    assert (
        file_extension("a.tar.gz"),
        file_extension(".hidden"),
        file_extension("a.b/c"),
        file_extension("a."),
    ) == (
        "gz",
        "",
        "",
        "",
    )


def test_the_page_names_every_type() -> None:
    section = PAGE.read_text().partition("## Types")[2].partition("\n## ")[0].partition("A file without")[0]
    assert set(re.findall(r"`(\w+)`", section)) == DEFAULT_ACCEPTED
