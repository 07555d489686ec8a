"""A client of OpenAI's Containers and Files APIs, with uploads, downloads and the options of the commands that use it.

Server responses are untrusted: their size is limited, and text is sanitized before it reaches a terminal or the disk.
"""

import http.client
import json
import os
import secrets
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, BinaryIO, cast
from urllib.parse import quote, urlencode, urlsplit

import typer

from fumehood.cli.options import EXIT_UNAVAILABLE, CommandFailed
from fumehood.cli.terminal_output import print_message, sanitize_text

EPILOG = (
    "The API key is read from FUMEHOOD_API_KEY or OPENAI_API_KEY. Exit codes: 0 success, 1 the server or the disk "
    "refused, 2 invalid usage, 125 the server cannot be reached."
)
_KEY_VARIABLES = ("FUMEHOOD_API_KEY", "OPENAI_API_KEY")
_CHUNK_BYTES = 1 << 18
_MAX_RESPONSE_BYTES = 64 << 20
_PAGE_SIZE = 100
_TIMEOUT_SECONDS = 60.0

type ApiObject = dict[str, object]

BaseUrlOption = Annotated[
    str,
    typer.Option(
        metavar="URL",
        envvar=["FUMEHOOD_BASE_URL", "OPENAI_BASE_URL"],
        help="The base URL of the server's API.",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="PATH", help="A file or a directory; - is standard output."),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]
LimitOption = Annotated[int, typer.Option(metavar="N", min=1, help="List at most this many, newest first.")]
DEFAULT_URL = "http://127.0.0.1:8080/v1"


class ApiClient:
    """Sends one request at a time, each on a new connection, without redirects or proxies."""

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise typer.BadParameter(
                "must be a URL such as http://127.0.0.1:8080/v1", param_hint="--base-url"
            )
        if parts.username is not None or parts.password is not None:
            raise typer.BadParameter(
                "must not contain credentials; API keys are read from the environment",
                param_hint="--base-url",
            )
        try:
            self._port = parts.port
        except ValueError:
            raise typer.BadParameter("has an invalid port", param_hint="--base-url") from None
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
        """List the newest objects, page by page; also returns whether there are more."""
        found: list[ApiObject] = []
        after: object = None
        while True:
            limit = min(_PAGE_SIZE, limit_total - len(found))
            page = self.get(path, limit=limit, order="desc", after=after, **query)
            rows = get_rows(page)
            found += rows
            more = page.get("has_more") is True and bool(rows)
            if not more or len(found) >= limit_total:
                return found[:limit_total], more or len(found) > limit_total
            after = found[-1].get("id")

    def upload(self, path: str, fields: Mapping[str, str], file: Path, name: str) -> ApiObject:
        """Send a multipart form with one file, streamed."""
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
            with show_progress(f"Sending {sanitize_text(name)}", size) as on_progress:
                body = _stream_form(head, source, size, tail, on_progress)
                return self._request_json("POST", path, body, headers)

    @contextmanager
    def download(self, path: str) -> Generator[tuple[int | None, Iterator[bytes]]]:
        """The size, if known, and the chunks of a file. Raises CommandFailed if the content is incomplete."""
        with self._open_request("GET", path) as response:
            yield response.length, self._read_chunks(response)

    # ---- requests -------------------------------------------------------------------------------------------------

    def _request_json(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        query_parameters: Mapping[str, object] | None = None,
    ) -> ApiObject:
        with (
            self._open_request(method, path, body, headers, query_parameters) as response,
            self._translate_errors(),
        ):
            return _read_json_object(response)

    @contextmanager
    def _open_request(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        query_parameters: Mapping[str, object] | None = None,
    ) -> Generator[http.client.HTTPResponse]:
        connection_class = http.client.HTTPSConnection if self._uses_tls else http.client.HTTPConnection
        connection = connection_class(self._host, self._port, timeout=_TIMEOUT_SECONDS)
        encoded_query = urlencode(
            {name: value for name, value in (query_parameters or {}).items() if value is not None}
        )
        target = f"{self._path}{path}{f'?{encoded_query}' if encoded_query else ''}"
        try:
            with self._translate_errors():
                response = _send_request(
                    connection, method, target, body, {**self._headers, **(headers or {})}
                )
                if response.status >= 300:
                    raise CommandFailed(_error_message(response))
            yield response
        finally:
            connection.close()

    @contextmanager
    def _translate_errors(self) -> Generator[None]:
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            reason = sanitize_text(str(error)) or type(error).__name__
            raise CommandFailed(
                f"{self._display_url} does not answer: {reason}.", EXIT_UNAVAILABLE
            ) from error

    def _read_chunks(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        wanted, size = response.length, 0
        while True:
            with self._translate_errors():
                chunk = response.read(_CHUNK_BYTES)
                size += len(chunk)
                if not chunk and wanted is not None and size != wanted:
                    raise http.client.IncompleteRead(b"", wanted - size)
            if not chunk:
                return
            yield chunk


def quote_path_segment(name: str) -> str:
    """Percent-encode one segment of a path."""
    return quote(name, safe="")


def _auth_headers() -> dict[str, str]:
    for variable in _KEY_VARIABLES:
        key = os.environ.get(variable, "").strip()
        if key:
            if not key.isascii() or not key.isprintable():
                raise typer.BadParameter("does not contain a valid API key", param_hint=variable)
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
        # The server may have rejected the request before reading all of it.
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
        raise CommandFailed("The server's response is not a JSON object; is this the URL of its API?")
    return cast("ApiObject", value)


def get_rows(found: ApiObject, name: str = "data") -> list[ApiObject]:
    """The objects of a list field."""
    data = found.get(name)
    rows = cast("list[object]", data) if isinstance(data, list) else []
    return [cast("ApiObject", row) for row in rows if isinstance(row, dict)]


def _error_message(response: http.client.HTTPResponse) -> str:
    """The server's error message, or its status."""
    message: object = None
    with suppress(CommandFailed):
        error = _read_json_object(response).get("error")
        message = cast("ApiObject", error).get("message") if isinstance(error, dict) else error
    text = sanitize_text(message) if isinstance(message, str) else ""
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
            chunk = source.read(min(_CHUNK_BYTES, left))
        except OSError as error:
            raise CommandFailed(f"The file cannot be read: {error.strerror}.") from None
        if not chunk:
            raise CommandFailed("The file was truncated during the upload.")
        left -= len(chunk)
        yield chunk
        on_progress(len(chunk))
    yield tail


# ---- output ------------------------------------------------------------------------------------------------------


type TransferProgress = Callable[[int], None]
"""Receives the number of bytes transferred since the last call."""


@contextmanager
def show_progress(title: str, size: int | None) -> Generator[TransferProgress]:
    """Show a progress bar on standard error if it is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=size)
        yield lambda size: progress.advance(task, size)


def delete_all(server: ApiClient, ids: Sequence[str], path: str) -> None:
    """Delete all of them; exit with 1 if the server refused any."""
    failures = 0
    for one in ids:
        try:
            server.delete(f"{path}/{quote_path_segment(one)}")
            print_message(f"Deleted {sanitize_text(one)}.")
        except CommandFailed as error:
            if error.exit_code == EXIT_UNAVAILABLE:
                raise
            failures += 1
            print_message(f"{sanitize_text(one)}: {error}")
    if failures:
        raise typer.Exit(1)


# ---- downloads ---------------------------------------------------------------------------------------------------


def download_file(server: ApiClient, path: str, name: str, output: Path | None, *, force: bool) -> None:
    """Save a file under its own name or as `output`; `-` is standard output. Raises CommandFailed."""
    if output == Path("-"):
        if sys.stdout.isatty() and not force:
            raise CommandFailed("The content may control this terminal; use a file, or --force.")
        with server.download(path) as (_, chunks):
            for chunk in chunks:
                sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
        return
    target = _choose_target(name, output)
    if target.is_dir() or (not force and os.path.lexists(target)):
        raise CommandFailed(f"{sanitize_text(str(target))} exists; --force overwrites it.")
    with (
        server.download(path) as (size, chunks),
        show_progress(f"Receiving {sanitize_text(target.name)}", size) as on_progress,
    ):
        try:
            written = _write_atomically(target, chunks, on_progress, force=force)
        except FileExistsError:
            raise CommandFailed(f"{sanitize_text(str(target))} exists; --force overwrites it.") from None
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
            f"{sanitize_text(last) or 'It'} is not saved under its own name: {error}; choose another with -o."
        ) from None
    return (output or Path()) / last


def _write_atomically(
    target: Path, chunks: Iterable[bytes], on_progress: TransferProgress, *, force: bool
) -> int:
    """Write a file completely or not at all. Raises FileExistsError, CommandFailed."""
    partial = target.with_name(f".{secrets.token_hex(8)}.part")
    written = 0
    try:
        with partial.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
                written += len(chunk)
                on_progress(len(chunk))
        if not force:
            # Claim the name, so that a file created meanwhile is not overwritten. Hard links do not work on every disk.
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
