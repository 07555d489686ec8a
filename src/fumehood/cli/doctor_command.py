"""`fumehood doctor`: checks whether this host can isolate code, or whether a gateway's data is intact."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fumehood.cli.options import (
    GuestSocketOption,
    LimitsOption,
    ModeOption,
    SandboxConfigOption,
    exit_on_error,
    load_sandbox_settings,
    require_linux,
)

if TYPE_CHECKING:
    from fumehood.sandbox_server.diagnostics import HostReport
    from fumehood.store import DatabaseReport

EPILOG = """\b
Exit codes:
  0  this host can isolate code, or the data is intact; there may be warnings
  1  it cannot, or the data is damaged
  2  invalid usage
"""
_STATE_STYLES = {"ok": "green", "warning": "yellow", "missing": "red", "damaged": "red"}
_VERDICTS = {
    "namespaces": "This host can isolate code",
    "pod": "This host can run code in the container, which isolates it",
    "unsafe-degraded": "This host can run code, confined by Landlock and a system-call filter only",
}


@exit_on_error()
def doctor(
    context: typer.Context,
    config: SandboxConfigOption = None,
    mode: ModeOption = "namespaces",
    limits: LimitsOption = "enforced",
    guest_socket: GuestSocketOption = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Check the database and the blobs of a gateway instead: their directory, or the database file.",
        ),
    ] = None,
    blobs: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", show_default="DIR/blobs", help="With --data: the directory of the blobs."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
) -> None:
    """Check whether this host can isolate code, and print what to do about each problem.

    With --data, check the stored data of a gateway instead. Nothing is changed; the gateway may be running.
    """
    if data is not None:
        raise typer.Exit(_check_data(data, blobs, json))
    if blobs is not None:
        raise typer.BadParameter("requires --data", param_hint="--blobs")
    require_linux()
    options = {"mode": mode, "limits": limits, "guest_socket": guest_socket}
    settings = replace(load_sandbox_settings(context, config, options), pool=0, capacity=1)
    logging.getLogger("fumehood").addHandler(logging.NullHandler())  # the findings contain all warnings
    from fumehood.sandbox_server.diagnostics import diagnose

    report = asyncio.run(diagnose(settings))
    verdict = _VERDICTS[report.mode] if report.is_usable else "This host cannot isolate code"
    raise typer.Exit(
        _report(report, f"{verdict} (mode {report.mode}).", passed=report.is_usable, as_json=json)
    )


def _check_data(data: Path, blobs: Path | None, as_json: bool) -> int:
    from fumehood.store import DatabaseNotFound, examine_database, find_database

    logging.getLogger("fumehood").addHandler(logging.NullHandler())  # the findings contain all damage
    try:
        database = find_database(data)
        report = examine_database(database, blobs or database.parent / "blobs")
    except DatabaseNotFound as error:
        raise typer.BadParameter(str(error), param_hint="--data") from error
    verdict = "The stored data is intact" if report.sound else "The stored data is damaged"
    text = f"{verdict} ({report.database}, {report.blobs})."
    return _report(report, text, passed=report.sound, as_json=as_json)


def _report(report: "HostReport | DatabaseReport", verdict: str, *, passed: bool, as_json: bool) -> int:
    """Print the report and return the exit code."""
    if as_json:
        import msgspec

        print(msgspec.json.encode(report).decode())
    else:
        _print_findings(report, verdict, passed=passed)
    return 0 if passed else 1


def _print_findings(report: "HostReport | DatabaseReport", verdict: str, *, passed: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=160)
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in report.findings:
        table.add_row(
            Text(finding.state, style=_STATE_STYLES[finding.state]), finding.name, Text(finding.detail)
        )
    console.print(table)
    for finding in report.findings:
        if finding.advice:
            console.print()
            console.print(Text(f"{finding.name}:", style=_STATE_STYLES[finding.state]))
            console.print(Text(finding.advice), soft_wrap=True)
    console.print()
    console.print(Text(verdict, style="green" if passed else "red"), soft_wrap=True)
