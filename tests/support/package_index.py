"""A package index on loopback with wheels made by hand, as hostile as need be.

with Index() as index:
    index.add(wheel("hello", "1.0", {"hello.py": "x = 1"}))
    SandboxServerSettings(index_url=index.url)
"""

import base64
import contextlib
import hashlib
import http.server
import io
import re
import stat
import tarfile
import threading
import zipfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, override


@dataclass(frozen=True)
class IndexFile:
    """One file of an index; `project` is its normalised name there."""

    project: str
    name: str
    content: bytes


@dataclass(frozen=True)
class WheelMember:
    """A file in a wheel that is not a plain one: other mode bits, or a name that is not taken as it is."""

    content: bytes
    mode: int = stat.S_IFREG | 0o644


def normalise_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def wheel(
    name: str,
    version: str,
    files: Mapping[str, str | bytes | WheelMember],
    *,
    requires: Sequence[str] = (),
    scripts: Mapping[str, str] | None = None,
    tag: str = "py3-none-any",
) -> IndexFile:
    """scripts: name -> `module:function`."""
    stem = f"{normalise_name(name).replace('-', '_')}-{version}"
    about = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: made for a test\n"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    members: dict[str, str | bytes | WheelMember] = {
        **files,
        f"{about}/METADATA": metadata,
        f"{about}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    if scripts:
        lines = "".join(f"{script} = {entry}\n" for script, entry in scripts.items())
        members[f"{about}/entry_points.txt"] = f"[console_scripts]\n{lines}"
    return IndexFile(normalise_name(name), f"{stem}-{tag}.whl", _zip(members, f"{about}/RECORD"))


def _zip(members: Mapping[str, str | bytes | WheelMember], record: str) -> bytes:
    rows: list[str] = []
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in members.items():
            member = content if isinstance(content, WheelMember) else WheelMember(_bytes(content))
            info = zipfile.ZipInfo(path, (2024, 1, 1, 0, 0, 0))
            info.external_attr = member.mode << 16
            archive.writestr(info, member.content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(member.content).digest()).rstrip(b"=").decode()
            rows.append(f"{path},sha256={digest},{len(member.content)}\n")
        archive.writestr(record, "".join([*rows, f"{record},,\n"]))
    return packed.getvalue()


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def sdist(name: str, version: str, marker: str) -> IndexFile:
    """Whose setup.py would write `marker`, were it ever run."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        files = {
            "setup.py": f"open({marker!r}, 'w').write('ran')\nfrom setuptools import setup; setup(name={name!r})",
            "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        }
        for path, text in files.items():
            info = tarfile.TarInfo(f"{name}-{version}/{path}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return IndexFile(normalise_name(name), f"{name}-{version}.tar.gz", packed.getvalue())


@dataclass
class FakePackageIndex:
    """Serves until it is closed; `asked` are the paths that were asked for; `hold` makes downloads wait.

    host: the address that it serves on.
    """

    files: dict[str, dict[str, IndexFile]] = field(default_factory=dict[str, dict[str, IndexFile]])
    asked: list[str] = field(default_factory=list[str])
    credentials: str | None = None  # "user:password", if it wants any
    hold: threading.Event | None = None
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                index.handle_request(self)

            def do_HEAD(self) -> None:
                index.handle_request(self)

            @override
            def log_message(self, format: str, *args: object) -> None:
                del format, args

        self._server = http.server.ThreadingHTTPServer((self.host, 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        user = f"{self.credentials}@" if self.credentials else ""
        return f"http://{user}{self.host}:{self.port}/simple"

    def add(self, *files: IndexFile) -> None:
        for file in files:
            self.files.setdefault(file.project, {})[file.name] = file

    def handle_request(self, request: http.server.BaseHTTPRequestHandler) -> None:
        self.asked.append(request.path if request.command == "GET" else f"HEAD {request.path}")
        wanted = None if self.credentials is None else base64.b64encode(self.credentials.encode()).decode()
        if wanted is not None and request.headers.get("Authorization") != f"Basic {wanted}":
            self._reply(request, 401, b"who are you?")
            return
        match request.path.strip("/").split("/"):
            case ["simple", project] if project in self.files:
                links = "".join(
                    f'<a href="/files/{project}/{name}#sha256={hashlib.sha256(file.content).hexdigest()}">{name}</a>'
                    for name, file in self.files[project].items()
                )
                self._reply(request, 200, f"<!DOCTYPE html><html><body>{links}</body></html>".encode())
            case ["files", project, name] if name in self.files.get(project, {}):
                if self.hold is not None and request.command == "GET":
                    self.hold.wait(60)
                self._reply(request, 200, self.files[project][name].content)
            case _:
                self._reply(request, 404, b"no")

    def _reply(self, request: http.server.BaseHTTPRequestHandler, status: int, body: bytes) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.send_header(
            "Content-Type", "text/html" if body.startswith(b"<") else "application/octet-stream"
        )
        if status == 401:
            request.send_header("WWW-Authenticate", "Basic")
        request.end_headers()
        if request.command == "GET":
            with contextlib.suppress(OSError):  # whoever asked may be gone
                request.wfile.write(body)

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """Let downloads wait until the end of the context."""
        self.hold = threading.Event()
        try:
            yield
        finally:
            self.hold.set()
            self.hold = None

    def downloads(self, project: str) -> int:
        """How often a wheel itself was fetched; metadata is asked for by name, too, and refused."""
        return len(
            [path for path in self.asked if path.startswith(f"/files/{project}/") and path.endswith(".whl")]
        )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
