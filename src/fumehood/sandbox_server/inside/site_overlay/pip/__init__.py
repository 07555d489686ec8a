"""Replaces pip in a sandbox: asks the supervisor to install packages.

A sandbox has no network for this and cannot write packages. The supervisor applies the same rules as to any request
for packages, and attaches the installed packages to the running sandbox.
"""

import contextlib
import importlib
import importlib.metadata
import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

__version__ = "25.3"  # the version of pip whose command line this follows

_ADDRESS = ("127.0.0.1", 3129)
_SOCKET = "/home/user/.fumehood/pip.sock"  # in a pod, where the loopback interface is not the sandbox's own
_TIMEOUT_SECONDS = 1800
_MAX_LINES = 1000
_HELP = """\
Usage: pip install [-q] [-U] [-r FILE] REQUIREMENT…
       pip list | freeze | show NAME… | --version

Packages are installed by the sandbox server from its own index, as wheels. Names, extras, versions and
markers can be given; options about indexes, paths and URLs cannot.
"""
_IGNORED = {
    *("-q", "-qq", "-qqq", "--quiet", "-v", "-vv", "-vvv", "--verbose", "-U", "--upgrade", "--user", "-y"),
    *("--yes", "--no-cache-dir", "--no-cache", "--disable-pip-version-check", "--break-system-packages"),
    *("--no-input", "--prefer-binary", "--no-warn-script-location", "--no-warn-conflicts", "--no-color"),
    *("--no-python-version-warning", "--ignore-installed", "-I", "--force-reinstall", "--compile"),
    *("--no-compile", "--isolated", "--use-pep517", "--no-build-isolation", "--system"),
}
_IGNORED_WITH_VALUE = {
    *("--progress-bar", "--root-user-action", "--timeout", "--retries", "--only-binary", "--cache-dir"),
    *("--upgrade-strategy", "--log", "--trusted-host", "--exists-action"),
}
_QUIET = {"-q", "-qq", "-qqq", "--quiet"}


class _Refused(Exception):
    """The command is not possible here; the text says why."""


def main(args: Sequence[str] | None = None) -> int:
    """Run a pip command line; returns the exit code."""
    arguments = list(sys.argv[1:] if args is None else args)
    while arguments and arguments[0] in _IGNORED:
        arguments.pop(0)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    command, *rest = arguments
    try:
        match command:
            case "install":
                return _install(rest)
            case "list" | "freeze":
                return _list(rest, freeze=command == "freeze")
            case "show":
                return _show(rest)
            case "-V" | "--version":
                version = f"{sys.version_info.major}.{sys.version_info.minor}"
                print(f"pip {__version__} (of the sandbox) (python {version})")
                return 0
            case "uninstall":
                raise _Refused("packages are read-only in a sandbox and cannot be uninstalled")
            case "download" | "wheel":
                raise _Refused("package files cannot be downloaded here; use `pip install`")
            case other:
                raise _Refused(
                    f"`pip {other}` is not available in a sandbox; install, list, freeze and show are"
                )
    except _Refused as refusal:
        print(f"ERROR: {refusal}.", file=sys.stderr)
        return 1


# ---- install --------------------------------------------------------------------------------------------------


def _install(arguments: list[str]) -> int:
    quiet = bool(_QUIET.intersection(arguments))
    lines = _requirements(arguments)
    if not lines:
        raise _Refused("you must give at least one requirement to install (see `pip help`)")
    for answer in _ask({"requirements": lines}):
        if "error" in answer:
            raise _Refused(str(answer["error"]).rstrip("."))
        if not quiet and (text := answer.get("progress") or answer.get("done")):
            print(text, flush=True)
        if "done" in answer:
            importlib.invalidate_caches()
            return 0
    raise _Refused("the sandbox server closed the connection without an answer")


def _requirements(arguments: list[str]) -> list[str]:
    lines: list[str] = []
    pending = list(arguments)
    while pending:
        item = pending.pop(0)
        option, _, value = item.partition("=")
        if not item.startswith("-"):
            lines.append(item)
        elif item in _IGNORED:
            continue
        elif option in _IGNORED_WITH_VALUE:
            if not value and pending:
                pending.pop(0)
        elif item == "--":
            lines += pending
            break
        elif option in ("-r", "--requirement") or item.startswith("-r"):
            name = value or (item[2:] if item.startswith("-r") and len(item) > 2 else "")
            if not name and not pending:
                raise _Refused("-r needs the name of a file")
            lines += _read(name or pending.pop(0))
        else:
            raise _Refused(
                f"the option {option} is not available in a sandbox: packages come from the sandbox server's own "
                "index, as wheels"
            )
    return lines


def _read(name: str) -> list[str]:
    try:
        with open(name, encoding="utf-8-sig") as file:
            lines = file.read(1 << 20).replace("\\\n", " ").splitlines()
    except (OSError, UnicodeError) as error:
        raise _Refused(f"could not open requirements file: {error}") from error
    wanted = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if len(wanted) > _MAX_LINES:
        raise _Refused(f"{name} has more than {_MAX_LINES} requirements")
    return wanted


def _connect() -> socket.socket:
    if not os.path.exists(_SOCKET):
        return socket.create_connection(_ADDRESS, timeout=10)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(10)
        connection.connect(_SOCKET)
    except BaseException:
        connection.close()
        raise
    return connection


def _ask(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Send a request and yield the supervisor's answers."""
    try:
        with _connect() as connection:
            connection.settimeout(_TIMEOUT_SECONDS)
            connection.sendall(json.dumps(request).encode() + b"\n")
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as answers:
                for line in answers:
                    yield json.loads(line)
    except (OSError, ValueError) as error:
        raise _Refused(f"the sandbox server cannot be reached: {error}") from error


# ---- list, show -----------------------------------------------------------------------------------------------


def _installed() -> list[tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for distribution in importlib.metadata.distributions():
        name: str | None = distribution.metadata["Name"]
        if name:
            # The first on the path is the one that is imported.
            found.setdefault(name.lower().replace("_", "-"), (name, distribution.version))
    return sorted(found.values(), key=lambda pair: pair[0].lower())


def _list(arguments: list[str], *, freeze: bool) -> int:
    form = "freeze" if freeze else "columns"
    for number, item in enumerate(arguments):
        if item.startswith("--format"):
            form = item.partition("=")[2] or (arguments[number + 1] if number + 1 < len(arguments) else form)
    found = _installed()
    if form == "json":
        print(json.dumps([{"name": name, "version": version} for name, version in found]))
    elif form == "freeze":
        print("\n".join(f"{name}=={version}" for name, version in found))
    else:
        width = max([len(name) for name, _ in found] + [len("Package")])
        print(f"{'Package':{width}} Version\n{'-' * width} -------")
        print("\n".join(f"{name:{width}} {version}" for name, version in found))
    return 0


def _show(arguments: list[str]) -> int:
    names = [name for name in arguments if not name.startswith("-")]
    if not names:
        raise _Refused("`pip show` needs the name of a package")
    code = 0
    for name in names:
        try:
            about = importlib.metadata.distribution(name)
        except (importlib.metadata.PackageNotFoundError, ValueError):
            print(f"WARNING: Package(s) not found: {name}", file=sys.stderr)
            code = 1
            continue
        for field in ("Name", "Version", "Summary", "Home-page", "Author", "License"):
            print(f"{field}: {about.metadata.get(field) or ''}")
        print(f"Location: {about.locate_file('')}")
        print(f"Requires: {', '.join(_needs(about))}")
    return code


def _needs(about: importlib.metadata.Distribution) -> list[str]:
    lines = [line for line in about.requires or () if "extra ==" not in line]
    return sorted({line.split(";")[0].split(" ")[0].split("[")[0].rstrip("<>=!~(") for line in lines})
