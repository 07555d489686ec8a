"""`fumehood doctor`: whether this machine can isolate code, and whether a gateway's data is whole."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from fumehood.cli.options import (
    GuestSocketOption,
    IsolationModeChoice,
    LimitEnforcementChoice,
    LimitsOption,
    ModeOption,
    SandboxConfigOption,
    load_sandbox_settings,
    require_linux,
)

if TYPE_CHECKING:
    from fumehood.sandbox_server.diagnostics import HostReport
    from fumehood.store import DatabaseReport as DataReport

EPILOG = """\b
Exit codes:
  0  code can be isolated here, or the data is whole, with or without warnings
  1  it cannot, or it is not
  2  this command was used wrongly
"""
_STATE_STYLES = {"ok": "green", "warning": "yellow", "missing": "red", "damaged": "red"}
_VERDICTS = {
    "namespaces": "Code can be isolated here",
    "pod": "Code can be run in the container, which is its wall",
    "unsafe-degraded": "Code can be run here, held by Landlock and a system-call filter only",
}


def doctor(
    context: typer.Context,
    config: SandboxConfigOption = None,
    mode: ModeOption = IsolationModeChoice.NAMESPACES,
    limits: LimitsOption = LimitEnforcementChoice.ENFORCED,
    guest_socket: GuestSocketOption = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Examine the database and the blobs of a gateway instead: the directory that has them, or the file.",
        ),
    ] = None,
    blobs: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default="DIR/blobs", help="With --data: the directory of blobs."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
) -> None:
    """Tell whether this machine can isolate code, and what to do about what is missing.

    With --data, tell whether what a gateway has stored can be read. Nothing is changed; a gateway may run meanwhile.
    """
    if data is not None:
        raise typer.Exit(_check_data(data, blobs, json))
    if blobs is not None:
        raise typer.BadParameter("it goes with --data", param_hint="--blobs")
    require_linux()
    options = {"mode": mode.value, "limits": limits.value, "guest_socket": guest_socket}
    settings = replace(load_sandbox_settings(context, config, options), pool=0, capacity=1)
    logging.getLogger("fumehood").addHandler(logging.NullHandler())  # what it warns of is among the findings
    from fumehood.sandbox_server.diagnostics import diagnose

    report = asyncio.run(diagnose(settings))
    if json:
        import msgspec

        print(msgspec.json.encode(report).decode())
    else:
        _print_host_report(report)
    raise typer.Exit(0 if report.is_usable else 1)


def _check_data(data: Path, blobs: Path | None, as_json: bool) -> int:
    from fumehood.store import DatabaseNotFound, examine_database, find_database

    logging.getLogger("fumehood").addHandler(logging.NullHandler())  # what is damaged is among the findings
    try:
        database = find_database(data)
        report = examine_database(database, blobs or database.parent / "blobs")
    except DatabaseNotFound as error:
        raise typer.BadParameter(str(error), param_hint="--data") from error
    if as_json:
        import msgspec

        print(msgspec.json.encode(report).decode())
    else:
        _print_data_report(report)
    return 0 if report.sound else 1


def _print_data_report(report: "DataReport") -> None:
    verdict = "What is stored is whole" if report.sound else "What is stored is damaged"
    _print_findings(report.findings, f"{verdict} ({report.database}, {report.blobs}).", passed=report.sound)


def _print_host_report(report: "HostReport") -> None:
    verdict = _VERDICTS[report.mode] if report.is_usable else "Code cannot be isolated here"
    _print_findings(report.findings, f"{verdict} (mode {report.mode}).", passed=report.is_usable)


class _Finding(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def detail(self) -> str: ...
    @property
    def advice(self) -> str: ...


def _print_findings(findings: Sequence[_Finding], verdict: str, *, passed: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=160)
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        table.add_row(
            Text(finding.state, style=_STATE_STYLES[finding.state]), finding.name, Text(finding.detail)
        )
    console.print(table)
    for finding in findings:
        if finding.advice:
            console.print()
            console.print(Text(f"{finding.name}:", style=_STATE_STYLES[finding.state]))
            console.print(Text(finding.advice), soft_wrap=True)
    console.print()
    console.print(Text(verdict, style="green" if passed else "red"), soft_wrap=True)
