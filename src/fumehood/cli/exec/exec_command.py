"""The command `fumehood exec` and its options."""

import asyncio
import math
import os
import sys
import tokenize
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fumehood.cli.options import (
    TOKEN_VARIABLE,
    GuestSocketOption,
    LimitsOption,
    MemorySizeChoice,
    ModeOption,
    exit_on_error,
    require_linux,
    resolve_guest_socket,
)

if TYPE_CHECKING:
    from fumehood.sandbox_client import RemoteSandboxProvider

_MAX_REMOTE_SECONDS = 86_400.0
EPILOG = """\b
Exit codes:
  0, 1, n  the code's own: it ended, it raised, it called sys.exit(n)
  2        invalid usage
  124      the code exceeded --timeout
  125      this host cannot isolate code, the sandbox was lost, packages could not be installed, or the server
           cannot be reached
  130      the code was interrupted
  137      the code ran out of memory
"""


@exit_on_error()
def execute(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(metavar="FILE|-", show_default=False, help="The file to run; - reads standard input."),
    ] = None,
    code: Annotated[str | None, typer.Option("-c", metavar="CODE", help="The code to run.")] = None,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Interrupt the code after this time, and kill it if it does not stop."
        ),
    ] = 60.0,
    memory: Annotated[
        MemorySizeChoice,
        typer.Option(help="The memory limit; files count, and may use half of it."),
    ] = "1g",
    file: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Copy this file into /mnt/data first; repeatable."),
    ] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="REQUIREMENT",
            help="Install this package first, such as humanize or 'numpy<2'; repeatable.",
        ),
    ] = None,
    files_out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Save the files that the code wrote to /mnt/data, and the images it displayed, in DIR. No file is "
            "overwritten: a new one gets a number. Not saved but listed: hidden files (a part of the path begins with "
            "a dot), files over 256 MiB, and those beyond 1 GiB in total.",
        ),
    ] = None,
    mode: ModeOption = "namespaces",
    limits: LimitsOption = "enforced",
    guest_socket: GuestSocketOption = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Run the code on this sandbox server: http://HOST:PORT, https://… or unix:/PATH. Its token is read "
            "from FUMEHOOD_SANDBOX_TOKEN.",
        ),
    ] = None,
    fresh_interpreter: Annotated[
        bool,
        typer.Option(
            "--fresh-interpreter",
            help="Start a new Python process instead of forking a warm one: slower, with its own address-space "
            "layout and hash seed.",
        ),
    ] = False,
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help='Print one JSON object per line for each event, and at the end one of the type "exit" with the exit '
            "code and the saved files.",
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only the output of the code, and errors.")
    ] = False,
) -> None:
    """Run Python code in a new sandbox, print its output, and save the files it wrote.

    The code has no access to files, variables and processes of this host, nor to the network. It runs in /mnt/data.
    Ctrl-C interrupts it; a second one kills it.
    """
    if not 0 < timeout < math.inf:
        raise typer.BadParameter("must be a positive number of seconds", param_hint="--timeout")
    text = _read_code(source, code)
    if server is None:
        require_linux()
    from fumehood.cli.exec.exec_session import (
        ExecJob,
        ExecSession,
        choose_preload,
        find_upload_problem,
        open_local_sandbox,
        open_remote_sandbox,
    )
    from fumehood.cli.output_directory import OutputDirectory
    from fumehood.protocol.sandbox.sandbox_messages import SandboxSpec

    spec = SandboxSpec(memory=memory, fresh_interpreter=fresh_interpreter, requirements=with_ or [])
    uploads = tuple(file or ())
    if problem := find_upload_problem(uploads, spec):
        raise typer.BadParameter(problem, param_hint="--file")
    if server is None:
        from fumehood.sandbox_server.settings import SandboxServerSettings

        socket = resolve_guest_socket(context, mode, guest_socket)
        settings = SandboxServerSettings(pool=0, capacity=1, mode=mode, limits=limits, guest_socket=socket)
        preload = choose_preload(text, uploads, settings.preload)
        open_sandbox = partial(open_local_sandbox, replace(settings, preload=preload), spec)
    else:
        open_sandbox = partial(open_remote_sandbox, _connect(context, server, timeout), spec)
    try:
        output_directory = None if files_out is None else OutputDirectory(files_out)
    except OSError as error:
        raise typer.BadParameter(f"{files_out}: {error.strerror}", param_hint="--files-out") from error
    job = ExecJob(
        code=text,
        timeout=timeout,
        open_sandbox=open_sandbox,
        uploads=uploads,
        output_directory=output_directory,
        json=json,
        quiet=quiet,
    )

    async def run() -> int:
        return await ExecSession(job).run()

    raise typer.Exit(asyncio.run(run()))


def _read_code(source: str | None, code: str | None) -> str:
    if (source is None) == (code is None):
        raise typer.BadParameter("use either -c CODE, or a FILE, or - for standard input", param_hint="code")
    try:
        if code is not None:
            code.encode()
            return code
        if source == "-":
            return _decode_source(sys.stdin.buffer.read())
        return _decode_source(Path(str(source)).read_bytes())
    except OSError as error:
        raise typer.BadParameter(f"{source}: {error.strerror}", param_hint="FILE") from error
    except (SyntaxError, UnicodeError, LookupError) as error:
        raise typer.BadParameter(f"the code is not valid text: {error}", param_hint="code") from error


def _decode_source(content: bytes) -> str:
    """Decode source code as Python does: UTF-8, unless the first lines declare another encoding."""
    lines = iter(content.splitlines(keepends=True))
    encoding, _ = tokenize.detect_encoding(lambda: next(lines, b""))
    return content.decode(encoding)


def _connect(context: typer.Context, url: str, timeout: float) -> "RemoteSandboxProvider":
    for name in ("mode", "limits", "guest_socket"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(
                f"{option} cannot be combined with it: the server decides", param_hint="--server"
            )
    if timeout > _MAX_REMOTE_SECONDS:
        raise typer.BadParameter("a server runs code for at most one day", param_hint="--timeout")
    from fumehood.sandbox_client import RemoteSandboxProvider

    try:
        return RemoteSandboxProvider(url, os.environ.get(TOKEN_VARIABLE) or None)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--server") from error
