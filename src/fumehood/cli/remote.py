"""A server of OpenAI's API, as commands ask it and as they show what it says; imports rich, `protocol` when it runs.

Everything that a server says is untrusted: it is bounded, and cleaned before it reaches a terminal or the disk.
"""

import http.client
import json
import os
import secrets
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, BinaryIO, cast
from urllib.parse import quote, urlencode, urlsplit

import typer

EPILOG = (
    "The key is taken from FUMEHOOD_API_KEY or OPENAI_API_KEY. Exit codes: 0 done, 1 the server or the disk refused, "
    "2 used wrongly, 125 the server cannot be reached."
)
UNREACHABLE = 125
_KEYS = ("FUMEHOOD_API_KEY", "OPENAI_API_KEY")
_PIECE = 1 << 18
_LARGEST_ANSWER = 64 << 20
_LONGEST_SENTENCE = 500
_PAGE = 100
_SECONDS = 60.0  # of silence

type Object = dict[str, object]
type Columns = Mapping[str, Callable[[Object], str]]
"""What a table shows of an object, by the heads of its columns."""

BaseUrlOption = Annotated[
    str,
    typer.Option(
        metavar="URL",
        envvar=["FUMEHOOD_BASE_URL", "OPENAI_BASE_URL"],
        help="The server, with the path under which its API begins.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
OutputOption = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="PATH", help="A file or a directory; - is standard output."),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace a file that is there.")]
LimitOption = Annotated[int, typer.Option(metavar="N", min=1, help="How many to show, the newest first.")]
DEFAULT_URL = "http://127.0.0.1:8080/v1"


class Refused(Exception):
    """What was asked for was not done; says why, fit to be shown."""


class Unreachable(Exception):
    """Nobody answers there; says where."""


class Server:
    """One request at a time, each on a connection of its own; no redirect is followed, and no proxy used."""

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise typer.BadParameter("a URL such as http://127.0.0.1:8080/v1", param_hint="--base-url")
        if parts.username is not None or parts.password is not None:
            raise typer.BadParameter("keys are taken from the environment", param_hint="--base-url")
        try:
            self._port = parts.port
        except ValueError:
            raise typer.BadParameter("that is no port", param_hint="--base-url") from None
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._path = parts.path.rstrip("/")
        self._where = f"{parts.scheme}://{parts.netloc}{self._path}"
        self._headers = {"Accept-Encoding": "identity", **_authorization()}

    def get(self, path: str, **query: object) -> Object:
        return self._asked("GET", path, query=query)

    def post(self, path: str, body: Mapping[str, object]) -> Object:
        headers = {"Content-Type": "application/json"}
        return self._asked("POST", path, json.dumps(body).encode(), headers)

    def delete(self, path: str) -> Object:
        return self._asked("DELETE", path)

    def listed(self, path: str, most: int, **query: object) -> tuple[list[Object], bool]:
        """The newest, page by page, and whether there are more."""
        found: list[Object] = []
        after: object = None
        while True:
            limit = min(_PAGE, most - len(found))
            page = self.get(path, limit=limit, order="desc", after=after, **query)
            listed = rows_of(page)
            found += listed
            more = page.get("has_more") is True and bool(listed)
            if not more or len(found) >= most:
                return found[:most], more or len(found) > most
            after = found[-1].get("id")

    def upload(self, path: str, fields: Mapping[str, str], file: Path, name: str) -> Object:
        """A form with one file, sent piece by piece."""
        try:
            source = file.open("rb")
        except OSError as error:
            raise Refused(f"{cleaned(str(file))} cannot be read: {error.strerror}.") from None
        with source:
            size = os.fstat(source.fileno()).st_size
            boundary = f"fumehood-{secrets.token_hex(16)}"
            head = b"".join(_field(boundary, key, value) for key, value in fields.items())
            head += _file_head(boundary, name)
            tail = f"\r\n--{boundary}--\r\n".encode()
            headers = {
                "Content-Type": f"multipart/form-data; boundary={boundary}",
                "Content-Length": str(len(head) + size + len(tail)),
            }
            with progress(f"Sending {cleaned(name)}", size) as advance:
                body = _form(head, source, size, tail, advance)
                return self._asked("POST", path, body, headers)

    @contextmanager
    def download(self, path: str) -> Generator[tuple[int | None, Iterator[bytes]]]:
        """Its size, if the server says it, and its content, of which nothing is missing when it ends."""
        with self._exchange("GET", path) as answer:
            yield answer.length, self._pieces(answer)

    # ---- exchanges ------------------------------------------------------------------------------------------------

    def _asked(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, object] | None = None,
    ) -> Object:
        with self._exchange(method, path, body, headers, query) as answer, self._reached():
            return _object(answer)

    @contextmanager
    def _exchange(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, object] | None = None,
    ) -> Generator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_SECONDS)
        asked = urlencode({name: value for name, value in (query or {}).items() if value is not None})
        target = f"{self._path}{path}{f'?{asked}' if asked else ''}"
        try:
            with self._reached():
                answer = _answered(connection, method, target, body, {**self._headers, **(headers or {})})
                if answer.status >= 300:
                    raise Refused(_sentence(answer))
            yield answer
        finally:
            connection.close()

    @contextmanager
    def _reached(self) -> Generator[None]:
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            why = cleaned(str(error)) or type(error).__name__
            raise Unreachable(f"{self._where} does not answer: {why}.") from error

    def _pieces(self, answer: http.client.HTTPResponse) -> Iterator[bytes]:
        wanted, size = answer.length, 0
        while True:
            with self._reached():
                piece = answer.read(_PIECE)
                size += len(piece)
                if not piece and wanted is not None and size != wanted:
                    raise http.client.IncompleteRead(b"", wanted - size)
            if not piece:
                return
            yield piece


def part(name: str) -> str:
    """One part of a path."""
    return quote(name, safe="")


def _authorization() -> dict[str, str]:
    for variable in _KEYS:
        key = os.environ.get(variable, "").strip()
        if key:
            if not key.isascii() or not key.isprintable():
                raise typer.BadParameter("it holds nothing that could be a key", param_hint=variable)
            return {"Authorization": f"Bearer {key}"}
    return {}


def _answered(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    body: bytes | Iterable[bytes] | None,
    headers: Mapping[str, str],
) -> http.client.HTTPResponse:
    try:
        connection.request(method, target, body, headers)
    except (BrokenPipeError, ConnectionResetError):
        # It has refused before it had everything; then it has said why.
        with suppress(OSError, http.client.HTTPException):
            return connection.getresponse()
        raise
    return connection.getresponse()


def _object(answer: http.client.HTTPResponse) -> Object:
    text = answer.read(_LARGEST_ANSWER + 1)
    try:
        value: object = json.loads(text) if len(text) <= _LARGEST_ANSWER else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Refused("The server's answer cannot be read; is this the address of its API?")
    return cast("Object", value)


def rows_of(found: Object, name: str = "data") -> list[Object]:
    """The objects in a list of a page, or of another object."""
    data = found.get(name)
    listed = cast("list[object]", data) if isinstance(data, list) else []
    return [cast("Object", row) for row in listed if isinstance(row, dict)]


def _sentence(answer: http.client.HTTPResponse) -> str:
    """Why the server refused, in its own words if it has some."""
    said: object = None
    with suppress(Refused):
        error = _object(answer).get("error")
        said = cast("Object", error).get("message") if isinstance(error, dict) else error
    text = cleaned(said) if isinstance(said, str) else ""
    if not text:
        return f"The server answered with {answer.status} {cleaned(answer.reason)}.".replace(" .", ".")
    return text if text[-1] in ".!?" else f"{text}."


# ---- forms -------------------------------------------------------------------------------------------------------


def _field(boundary: str, name: str, value: str) -> bytes:
    return f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


def _file_head(boundary: str, name: str) -> bytes:
    for char, written in (('"', "%22"), ("\r", "%0D"), ("\n", "%0A")):
        name = name.replace(char, written)
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
    return f"{head}Content-Type: application/octet-stream\r\n\r\n".encode(errors="replace")


def _form(head: bytes, source: BinaryIO, size: int, tail: bytes, advance: "Advance") -> Generator[bytes]:
    yield head
    left = size
    while left:
        try:
            piece = source.read(min(_PIECE, left))
        except OSError as error:
            raise Refused(f"The file cannot be read: {error.strerror}.") from None
        if not piece:
            raise Refused("The file became shorter while it was sent.")
        left -= len(piece)
        yield piece
        advance(len(piece))
    yield tail


# ---- what is shown -----------------------------------------------------------------------------------------------


class Advance:
    """Told how much has been done."""

    def __call__(self, size: int) -> None:
        """Shows nothing, where nobody looks."""


@contextmanager
def progress(title: str, size: int | None) -> Generator[Advance]:
    """On standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield Advance()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=size)

        class Shown(Advance):
            def __call__(self, size: int) -> None:
                shown.advance(task, size)

        yield Shown()


def cleaned(text: str) -> str:
    """Fit for a terminal: on one line, without control characters or such that change how the rest looks."""
    from fumehood.protocol.names import clean_name

    return clean_name(" ".join(text.split()), _LONGEST_SENTENCE)


def text_of(row: Object, name: str) -> str:
    value = row.get(name)
    return "" if value is None else cleaned(value if isinstance(value, str) else json.dumps(value))


def time_of(row: Object, name: str) -> str:
    value = row.get(name)
    with suppress(OverflowError, OSError, ValueError):
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M")
    return ""


def size_of(row: Object, name: str) -> str:
    value = row.get(name)
    return f"{value:,}" if isinstance(value, int) else ""


def print_json(rows: Iterable[Object]) -> None:
    """In ASCII, so that no terminal obeys it."""
    for row in rows:
        print(json.dumps(row).replace("\x7f", "\\u007f"))


def print_list(found: Sequence[Object], more: bool, columns: Columns, *, as_json: bool, none: str) -> None:
    """`more`: whether the server has others. `none` is said where there is nothing."""
    if as_json:
        print_json(found)
    elif found:
        _print_table(found, columns)
    else:
        note(none)
    if more:
        note(f"There are more than {len(found)}; --limit shows them.")


def _print_table(found: Sequence[Object], columns: Columns) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in columns:
        table.add_column(head, no_wrap=True, justify="right" if head == "BYTES" else "left")
    for row in found:
        table.add_row(*(Text(cell(row)) for cell in columns.values()))
    wide = None if sys.stdout.isatty() else 10_000
    Console(width=wide, highlight=False).print(table, soft_wrap=True)


def print_object(row: Object, *, as_json: bool) -> None:
    if as_json:
        print_json([row])
        return
    names = [cleaned(name) for name in row]
    width = max(map(len, names), default=0)
    for name, shown in zip(row, names, strict=True):
        value = time_of(row, name) if name.endswith("_at") else text_of(row, name)
        print(f"{shown.ljust(width)}  {value}")


def note(text: str) -> None:
    print(text, file=sys.stderr)


@contextmanager
def told() -> Generator[None]:
    """What goes wrong, in one sentence and an exit code."""
    try:
        yield
    except Refused as error:
        note(str(error))
        raise typer.Exit(1) from None
    except Unreachable as error:
        note(str(error))
        raise typer.Exit(UNREACHABLE) from None


def remove_all(server: Server, ids: Sequence[str], path: str) -> None:
    """Every one that can be removed."""
    refused = 0
    for one in ids:
        try:
            server.delete(f"{path}/{part(one)}")
            note(f"Deleted {cleaned(one)}.")
        except Refused as error:
            refused += 1
            note(f"{cleaned(one)}: {error}")
    if refused:
        raise typer.Exit(1)


# ---- what is saved -----------------------------------------------------------------------------------------------


def save(server: Server, path: str, name: str, output: Path | None, *, force: bool) -> None:
    """Under its own name here, or where it is wanted; `-` is standard output."""
    if output == Path("-"):
        if sys.stdout.isatty() and not force:
            raise Refused("Its content may act on this terminal; give a file, or --force.")
        with server.download(path) as (_, pieces):
            for piece in pieces:
                sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return
    target = _target(name, output)
    if target.is_dir() or (not force and os.path.lexists(target)):
        raise Refused(f"{cleaned(str(target))} is there already; --force replaces a file.")
    with (
        server.download(path) as (size, pieces),
        progress(f"Receiving {cleaned(target.name)}", size) as advance,
    ):
        try:
            written = _write(target, pieces, advance, force=force)
        except FileExistsError:
            raise Refused(f"{cleaned(str(target))} is there already; --force replaces a file.") from None
    note(f"Saved {cleaned(str(target))} ({written:,} bytes).")


def _target(name: str, output: Path | None) -> Path:
    from fumehood.cli.folders import NotSaved, checked_parts

    if output is not None and not output.is_dir():
        return output
    last = name.rpartition("/")[2]
    try:
        checked_parts(last)
    except NotSaved as error:
        raise Refused(
            f"{cleaned(last) or 'It'} is not saved under its own name: {error}; give one with -o."
        ) from None
    return (output or Path()) / last


def _write(target: Path, pieces: Iterable[bytes], advance: Advance, *, force: bool) -> int:
    """Whole or not at all; raises FileExistsError."""
    partial = target.with_name(f".{secrets.token_hex(8)}.part")
    written = 0
    try:
        with partial.open("xb") as file:
            for piece in pieces:
                file.write(piece)
                written += len(piece)
                advance(len(piece))
        if not force:
            # So that whatever has come there meanwhile is not replaced; links would not do on every disk.
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        partial.replace(target)
    except FileExistsError:
        raise
    except OSError as error:
        raise Refused(f"{cleaned(str(target))} cannot be written: {error.strerror}.") from None
    finally:
        with suppress(OSError):
            partial.unlink()
    return written
