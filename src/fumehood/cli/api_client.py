"""A server of OpenAI's API, as commands ask it and as they show what it says.

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
EXIT_UNREACHABLE = 125
_KEY_VARIABLES = ("FUMEHOOD_API_KEY", "OPENAI_API_KEY")
_CHUNK_BYTES = 1 << 18
_MAX_RESPONSE_BYTES = 64 << 20
_MAX_MESSAGE_LENGTH = 500
_PAGE_SIZE = 100
_TIMEOUT_SECONDS = 60.0  # of silence

type ApiObject = dict[str, object]
type TableColumns = Mapping[str, Callable[[ApiObject], str]]
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


class CommandFailed(Exception):
    """What was asked for was not done; says why, fit to be shown."""


class ApiUnreachable(Exception):
    """Nobody answers there; says where."""


class ApiClient:
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
        self._uses_tls = parts.scheme == "https"
        self._host = parts.hostname
        self._path = parts.path.rstrip("/")
        self._display_url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self._headers = {"Accept-Encoding": "identity", **_auth_headers()}

    def get(self, path: str, **query: object) -> ApiObject:
        return self._request_json("GET", path, query_parameters=query)

    def post(self, path: str, body: Mapping[str, object]) -> ApiObject:
        headers = {"Content-Type": "application/json"}
        return self._request_json("POST", path, json.dumps(body).encode(), headers)

    def delete(self, path: str) -> ApiObject:
        return self._request_json("DELETE", path)

    def list_objects(self, path: str, limit_total: int, **query: object) -> tuple[list[ApiObject], bool]:
        """The newest, page by page, and whether there are more."""
        found: list[ApiObject] = []
        after: object = None
        while True:
            limit = min(_PAGE_SIZE, limit_total - len(found))
            page = self.get(path, limit=limit, order="desc", after=after, **query)
            listed = get_rows(page)
            found += listed
            more = page.get("has_more") is True and bool(listed)
            if not more or len(found) >= limit_total:
                return found[:limit_total], more or len(found) > limit_total
            after = found[-1].get("id")

    def upload(self, path: str, fields: Mapping[str, str], file: Path, name: str) -> ApiObject:
        """A form with one file, sent piece by piece."""
        try:
            source = file.open("rb")
        except OSError as error:
            raise CommandFailed(f"{sanitize_text(str(file))} cannot be read: {error.strerror}.") from None
        with source:
            size = os.fstat(source.fileno()).st_size
            boundary = f"fumehood-{secrets.token_hex(16)}"
            head = b"".join(_encode_form_field(boundary, key, value) for key, value in fields.items())
            head += _encode_file_header(boundary, name)
            tail = f"\r\n--{boundary}--\r\n".encode()
            headers = {
                "Content-Type": f"multipart/form-data; boundary={boundary}",
                "Content-Length": str(len(head) + size + len(tail)),
            }
            with show_progress(f"Sending {sanitize_text(name)}", size) as advance:
                body = _stream_form(head, source, size, tail, advance)
                return self._request_json("POST", path, body, headers)

    @contextmanager
    def download(self, path: str) -> Generator[tuple[int | None, Iterator[bytes]]]:
        """Its size, if the server says it, and its content, of which nothing is missing when it ends."""
        with self._open_request("GET", path) as answer:
            yield answer.length, self._read_chunks(answer)

    # ---- exchanges ------------------------------------------------------------------------------------------------

    def _request_json(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        query_parameters: Mapping[str, object] | None = None,
    ) -> ApiObject:
        with (
            self._open_request(method, path, body, headers, query_parameters) as answer,
            self._translate_errors(),
        ):
            return _read_json_object(answer)

    @contextmanager
    def _open_request(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        query_parameters: Mapping[str, object] | None = None,
    ) -> Generator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._uses_tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_TIMEOUT_SECONDS)
        asked = urlencode(
            {name: value for name, value in (query_parameters or {}).items() if value is not None}
        )
        target = f"{self._path}{path}{f'?{asked}' if asked else ''}"
        try:
            with self._translate_errors():
                answer = _send_request(connection, method, target, body, {**self._headers, **(headers or {})})
                if answer.status >= 300:
                    raise CommandFailed(_error_message(answer))
            yield answer
        finally:
            connection.close()

    @contextmanager
    def _translate_errors(self) -> Generator[None]:
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            why = sanitize_text(str(error)) or type(error).__name__
            raise ApiUnreachable(f"{self._display_url} does not answer: {why}.") from error

    def _read_chunks(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        wanted, size = response.length, 0
        while True:
            with self._translate_errors():
                piece = response.read(_CHUNK_BYTES)
                size += len(piece)
                if not piece and wanted is not None and size != wanted:
                    raise http.client.IncompleteRead(b"", wanted - size)
            if not piece:
                return
            yield piece


def quote_path_segment(name: str) -> str:
    """One part of a path."""
    return quote(name, safe="")


def _auth_headers() -> dict[str, str]:
    for variable in _KEY_VARIABLES:
        key = os.environ.get(variable, "").strip()
        if key:
            if not key.isascii() or not key.isprintable():
                raise typer.BadParameter("it holds nothing that could be a key", param_hint=variable)
            return {"Authorization": f"Bearer {key}"}
    return {}


def _send_request(
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


def _read_json_object(response: http.client.HTTPResponse) -> ApiObject:
    text = response.read(_MAX_RESPONSE_BYTES + 1)
    try:
        value: object = json.loads(text) if len(text) <= _MAX_RESPONSE_BYTES else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise CommandFailed("The server's answer cannot be read; is this the address of its API?")
    return cast("ApiObject", value)


def get_rows(found: ApiObject, name: str = "data") -> list[ApiObject]:
    """The objects in a list of a page, or of another object."""
    data = found.get(name)
    listed = cast("list[object]", data) if isinstance(data, list) else []
    return [cast("ApiObject", row) for row in listed if isinstance(row, dict)]


def _error_message(response: http.client.HTTPResponse) -> str:
    """Why the server refused, in its own words if it has some."""
    said: object = None
    with suppress(CommandFailed):
        error = _read_json_object(response).get("error")
        said = cast("ApiObject", error).get("message") if isinstance(error, dict) else error
    text = sanitize_text(said) if isinstance(said, str) else ""
    if not text:
        return f"The server answered with {response.status} {sanitize_text(response.reason)}.".replace(
            " .", "."
        )
    return text if text[-1] in ".!?" else f"{text}."


# ---- forms -------------------------------------------------------------------------------------------------------


def _encode_form_field(boundary: str, name: str, value: str) -> bytes:
    return f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


def _encode_file_header(boundary: str, name: str) -> bytes:
    for char, written in (('"', "%22"), ("\r", "%0D"), ("\n", "%0A")):
        name = name.replace(char, written)
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
    return f"{head}Content-Type: application/octet-stream\r\n\r\n".encode(errors="replace")


def _stream_form(
    head: bytes, source: BinaryIO, size: int, tail: bytes, on_progress: "TransferProgress"
) -> Generator[bytes]:
    yield head
    left = size
    while left:
        try:
            piece = source.read(min(_CHUNK_BYTES, left))
        except OSError as error:
            raise CommandFailed(f"The file cannot be read: {error.strerror}.") from None
        if not piece:
            raise CommandFailed("The file became shorter while it was sent.")
        left -= len(piece)
        yield piece
        on_progress(len(piece))
    yield tail


# ---- what is shown -----------------------------------------------------------------------------------------------


class TransferProgress:
    """Told how much has been done."""

    def __call__(self, size: int) -> None:
        """Shows nothing, where nobody looks."""


@contextmanager
def show_progress(title: str, size: int | None) -> Generator[TransferProgress]:
    """On standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield TransferProgress()
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

        class TransferProgressBar(TransferProgress):
            def __call__(self, size: int) -> None:
                shown.advance(task, size)

        yield TransferProgressBar()


def sanitize_text(text: str) -> str:
    """Fit for a terminal: on one line, without control characters or such that change how the rest looks."""
    from fumehood.protocol.safe_names import sanitize_name

    return sanitize_name(" ".join(text.split()), _MAX_MESSAGE_LENGTH)


def format_text(row: ApiObject, name: str) -> str:
    value = row.get(name)
    return "" if value is None else sanitize_text(value if isinstance(value, str) else json.dumps(value))


def format_time(row: ApiObject, name: str) -> str:
    value = row.get(name)
    with suppress(OverflowError, OSError, ValueError):
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M")
    return ""


def format_size(row: ApiObject, name: str) -> str:
    value = row.get(name)
    return f"{value:,}" if isinstance(value, int) else ""


def print_json(rows: Iterable[ApiObject]) -> None:
    """In ASCII, so that no terminal obeys it."""
    for row in rows:
        print(json.dumps(row).replace("\x7f", "\\u007f"))


def print_list(
    found: Sequence[ApiObject], more: bool, columns: TableColumns, *, as_json: bool, empty_message: str
) -> None:
    """`more`: whether the server has others. `none` is said where there is nothing."""
    if as_json:
        print_json(found)
    elif found:
        _print_table(found, columns)
    else:
        print_message(empty_message)
    if more:
        print_message(f"There are more than {len(found)}; --limit shows them.")


def _print_table(found: Sequence[ApiObject], columns: TableColumns) -> None:
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


def print_object(row: ApiObject, *, as_json: bool) -> None:
    if as_json:
        print_json([row])
        return
    names = [sanitize_text(name) for name in row]
    width = max(map(len, names), default=0)
    for name, shown in zip(row, names, strict=True):
        value = format_time(row, name) if name.endswith("_at") else format_text(row, name)
        print(f"{shown.ljust(width)}  {value}")


def print_message(text: str) -> None:
    print(text, file=sys.stderr)


@contextmanager
def exit_on_error() -> Generator[None]:
    """What goes wrong, in one sentence and an exit code."""
    try:
        yield
    except CommandFailed as error:
        print_message(str(error))
        raise typer.Exit(1) from None
    except ApiUnreachable as error:
        print_message(str(error))
        raise typer.Exit(EXIT_UNREACHABLE) from None


def delete_all(server: ApiClient, ids: Sequence[str], path: str) -> None:
    """Every one that can be removed."""
    refused = 0
    for one in ids:
        try:
            server.delete(f"{path}/{quote_path_segment(one)}")
            print_message(f"Deleted {sanitize_text(one)}.")
        except CommandFailed as error:
            refused += 1
            print_message(f"{sanitize_text(one)}: {error}")
    if refused:
        raise typer.Exit(1)


# ---- what is saved -----------------------------------------------------------------------------------------------


def download_file(server: ApiClient, path: str, name: str, output: Path | None, *, force: bool) -> None:
    """Under its own name here, or where it is wanted; `-` is standard output."""
    if output == Path("-"):
        if sys.stdout.isatty() and not force:
            raise CommandFailed("Its content may act on this terminal; give a file, or --force.")
        with server.download(path) as (_, pieces):
            for piece in pieces:
                sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return
    target = _choose_target(name, output)
    if target.is_dir() or (not force and os.path.lexists(target)):
        raise CommandFailed(f"{sanitize_text(str(target))} is there already; --force replaces a file.")
    with (
        server.download(path) as (size, pieces),
        show_progress(f"Receiving {sanitize_text(target.name)}", size) as advance,
    ):
        try:
            written = _write_atomically(target, pieces, advance, force=force)
        except FileExistsError:
            raise CommandFailed(
                f"{sanitize_text(str(target))} is there already; --force replaces a file."
            ) from None
    print_message(f"Saved {sanitize_text(str(target))} ({written:,} bytes).")


def _choose_target(name: str, output: Path | None) -> Path:
    from fumehood.cli.output_directory import FileNotSaved, split_safe_path

    if output is not None and not output.is_dir():
        return output
    last = name.rpartition("/")[2]
    try:
        split_safe_path(last)
    except FileNotSaved as error:
        raise CommandFailed(
            f"{sanitize_text(last) or 'It'} is not saved under its own name: {error}; give one with -o."
        ) from None
    return (output or Path()) / last


def _write_atomically(
    target: Path, chunks: Iterable[bytes], on_progress: TransferProgress, *, force: bool
) -> int:
    """Whole or not at all; raises FileExistsError."""
    partial = target.with_name(f".{secrets.token_hex(8)}.part")
    written = 0
    try:
        with partial.open("xb") as file:
            for piece in chunks:
                file.write(piece)
                written += len(piece)
                on_progress(len(piece))
        if not force:
            # So that whatever has come there meanwhile is not replaced; links would not do on every disk.
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        partial.replace(target)
    except FileExistsError:
        raise
    except OSError as error:
        raise CommandFailed(f"{sanitize_text(str(target))} cannot be written: {error.strerror}.") from None
    finally:
        with suppress(OSError):
            partial.unlink()
    return written
