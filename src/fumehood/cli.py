"""The command line: `exec`, `doctor` and where the rest is; imports typer, and what a command needs when it runs."""

import asyncio
import logging
import math
import os
import sys
import tokenize
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fumehood import __version__

try:
    import typer
except ModuleNotFoundError as error:  # the base install is the client library
    raise SystemExit("The command line needs an extra: pip install 'fumehood[server]'") from error

from fumehood import cli_containers, cli_keys, cli_parts, cli_sandbox, cli_serve, cli_uploads
from fumehood.cli_options import (
    ConfigOption,
    GuestSocketOption,
    Limits,
    LimitsOption,
    Memory,
    Mode,
    ModeOption,
    configured,
    guest_socket_for,
)

if TYPE_CHECKING:
    from fumehood.cli_places import Here, Place, There
    from fumehood.protocol.sandbox import SandboxSpec
    from fumehood.sandboxd.probe import Report
    from fumehood.sandboxd.settings import Settings


_LONGEST_ON_A_SERVER = 86_400.0
_EXEC_EPILOG = """\b
Exit codes:
  0, 1, n  the code's own: it ended, it raised, it called sys.exit(n)
  2        this command was used wrongly
  124      the code ran longer than --timeout
  125      the code could not be isolated, its sandbox was lost, packages could not be installed, or the server
           cannot be reached
  130      the code was interrupted
  137      the code ran out of memory
"""
_DOCTOR_EPILOG = "Exit code: 0 if code can be isolated here, with or without warnings, else 1."

_VERDICTS = {
    "namespaces": "Code can be isolated here",
    "pod": "Code can be run in the container, which is its wall",
    "unsafe-degraded": "Code can be run here, held by Landlock and a system-call filter only",
}

app = typer.Typer(
    help="An open, self-hosted code interpreter: runs Python that you do not trust in isolated sandboxes.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    _fill_standard_descriptors()
    app(prog_name="fumehood")


def _fill_standard_descriptors() -> None:
    """If the caller closed one of 0, 1, 2, the next file to be opened would become it."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _show_version(value: bool) -> None:
    if value:
        print(f"fumehood {__version__}")
        raise typer.Exit


@app.callback()
def fumehood(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave."),
    ] = False,
) -> None:
    """The group itself has nothing to do."""
    del version


# In a list of commands there is room for about sixty characters of each.
app.command(
    "serve",
    epilog=cli_serve.EPILOG,
    short_help="Serve the Responses API, with a code interpreter.",
)(cli_serve.serve)
app.add_typer(cli_keys.app, name="keys", short_help="API keys of the gateway.")
app.add_typer(cli_containers.app, name="containers")
app.add_typer(cli_uploads.app, name="files")
app.add_typer(cli_parts.app, name="parts", short_help="Tool calls as telemetry records them, of any vendor.")
app.command("sandbox", epilog=cli_sandbox.EPILOG, short_help="Serve sandboxes to a gateway or any program.")(
    cli_sandbox.sandbox
)


# ---- exec -----------------------------------------------------------------------------------------------------


@app.command("exec", epilog=_EXEC_EPILOG, short_help="Run Python in a sandbox of its own.")
def execute(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(metavar="FILE|-", show_default=False, help="The file to run; - reads standard input."),
    ] = None,
    code: Annotated[str | None, typer.Option("-c", metavar="CODE", help="The code to run.")] = None,
    timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Interrupt the code after so long, and kill it if need be."),
    ] = 60.0,
    memory: Annotated[
        Memory, typer.Option(help="What the sandbox may use; its files count, and may be half of it.")
    ] = Memory.ONE,
    file: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Put this file into /mnt/data first; may be given several times."),
    ] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="REQUIREMENT",
            help="Install this package first, such as humanize or 'numpy<2'; may be given several times.",
        ),
    ] = None,
    files_out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Save the files that the code wrote to /mnt/data, and the pictures it showed, in DIR. Nothing there "
            "is replaced: a file that differs from one of its name gets a number. Not saved, but named: hidden files "
            "(a part of the path begins with a dot), files of more than 256 MiB, and what would make it more than "
            "1 GiB in all.",
        ),
    ] = None,
    mode: ModeOption = Mode.NAMESPACES,
    limits: LimitsOption = Limits.ENFORCED,
    guest_socket: GuestSocketOption = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Run the code on this sandbox server: http://HOST:PORT, https://… or unix:/PATH. Its token is read "
            "from the variable FUMEHOOD_SANDBOX_TOKEN.",
        ),
    ] = None,
    fresh_interpreter: Annotated[
        bool,
        typer.Option(
            "--fresh-interpreter",
            help="Start a new Python in the sandbox rather than a copy of a running one: an address-space layout "
            "and a hash seed of its own, slower.",
        ),
    ] = False,
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help='Print one JSON object per line for each event as it comes, then one of the type "exit" with the '
            "exit code and the saved files.",
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Say nothing but what the code says, and what went wrong.")
    ] = False,
) -> None:
    """Run Python in a sandbox of its own, show what it prints, and take home what it made.

    The code sees no files, variables or processes of this machine, and no network. It works in /mnt/data.
    Ctrl-C interrupts it; a second one ends it at once.
    """
    if not 0 < timeout < math.inf:
        raise typer.BadParameter("must be a positive number of seconds", param_hint="--timeout")
    text = _read_code(source, code)
    if server is None:
        _require_linux()
    from fumehood.cli_exec import Job, Session
    from fumehood.cli_files import Folder
    from fumehood.protocol.sandbox import SandboxSpec

    spec = SandboxSpec(memory=memory.value, fresh_interpreter=fresh_interpreter, requirements=with_ or [])
    uploads = _check_uploads(file or [], spec)
    place: Place
    if server is None:
        place = _here(_settings(context, mode, limits, guest_socket), text, uploads)
    else:
        place = _there(context, server, timeout)
    try:
        folder = None if files_out is None else Folder(files_out)
    except OSError as error:
        raise typer.BadParameter(f"{files_out}: {error.strerror}", param_hint="--files-out") from error
    job = Job(
        code=text,
        timeout=timeout,
        spec=spec,
        place=place,
        uploads=uploads,
        folder=folder,
        json=json,
        quiet=quiet,
    )

    async def run() -> int:
        return await Session(job).run()

    raise typer.Exit(asyncio.run(run()))


def _read_code(source: str | None, code: str | None) -> str:
    if (source is None) == (code is None):
        raise typer.BadParameter("give either -c CODE, or a FILE, or - for standard input", param_hint="code")
    try:
        if code is not None:
            code.encode()
            return code
        if source == "-":
            return _decode(sys.stdin.buffer.read())
        return _decode(Path(str(source)).read_bytes())
    except OSError as error:
        raise typer.BadParameter(f"{source}: {error.strerror}", param_hint="FILE") from error
    except (SyntaxError, UnicodeError, LookupError) as error:
        raise typer.BadParameter(f"the code is not valid text: {error}", param_hint="code") from error


def _decode(content: bytes) -> str:
    """As Python itself reads a source file: UTF-8, unless the first lines say otherwise."""
    lines = iter(content.splitlines(keepends=True))
    encoding, _ = tokenize.detect_encoding(lambda: next(lines, b""))
    return content.decode(encoding)


def _check_uploads(paths: "list[Path]", spec: "SandboxSpec") -> tuple[Path, ...]:
    from fumehood.cli_exec import check_uploads

    if problem := check_uploads(paths, spec):
        raise typer.BadParameter(problem, param_hint="--file")
    return tuple(paths)


def _require_linux() -> None:
    if sys.platform != "linux":
        print("Sandboxes need Linux.", file=sys.stderr)
        raise typer.Exit(125)


def _settings(context: typer.Context, mode: Mode, limits: Limits, guest_socket: Path | None) -> "Settings":
    from fumehood.sandboxd.settings import Settings

    guest_socket = guest_socket_for(context, mode, guest_socket)
    return Settings(pool=0, capacity=1, mode=mode.value, limits=limits.value, guest_socket=guest_socket)


def _here(settings: "Settings", text: str, uploads: tuple[Path, ...]) -> "Here":
    from fumehood.cli_exec import light_preload
    from fumehood.cli_places import Here

    return Here(replace(settings, preload=light_preload(text, uploads, settings.preload)))


def _there(context: typer.Context, url: str, timeout: float) -> "There":
    for name in ("mode", "limits", "guest_socket"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(f"{option} is the server's to choose", param_hint="--server")
    if timeout > _LONGEST_ON_A_SERVER:
        raise typer.BadParameter("a server runs code for at most a day", param_hint="--timeout")
    from fumehood.cli_places import There
    from fumehood.sandbox.remote import RemoteSandboxes

    try:
        return There(RemoteSandboxes(url, os.environ.get(cli_sandbox.TOKEN_VARIABLE) or None))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--server") from error


# ---- doctor ---------------------------------------------------------------------------------------------------


@app.command("doctor", epilog=_DOCTOR_EPILOG, short_help="Tell whether this machine can isolate code.")
def doctor(
    context: typer.Context,
    config: ConfigOption = None,
    mode: ModeOption = Mode.NAMESPACES,
    limits: LimitsOption = Limits.ENFORCED,
    guest_socket: GuestSocketOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
) -> None:
    """Tell whether this machine can isolate code, and what to do about what is missing."""
    _require_linux()
    options = {"mode": mode.value, "limits": limits.value, "guest_socket": guest_socket}
    settings = replace(configured(context, config, options), pool=0, capacity=1)
    logging.getLogger("fumehood").addHandler(logging.NullHandler())  # what it warns of is among the findings
    from fumehood.sandboxd import probe

    report = asyncio.run(probe.examine(settings))
    if json:
        import msgspec

        print(msgspec.json.encode(report).decode())
    else:
        _render(report)
    raise typer.Exit(0 if report.works else 1)


def _render(report: "Report") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=160)
    colours = {"ok": "green", "warning": "yellow", "missing": "red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in report.findings:
        table.add_row(Text(finding.state, style=colours[finding.state]), finding.name, Text(finding.detail))
    console.print(table)
    for finding in report.findings:
        if finding.advice:
            console.print()
            console.print(Text(f"{finding.name}:", style=colours[finding.state]))
            console.print(Text(finding.advice), soft_wrap=True)
    console.print()
    verdict = _VERDICTS[report.mode] if report.works else "Code cannot be isolated here"
    console.print(Text(f"{verdict} (mode {report.mode}).", style="green" if report.works else "red"))
