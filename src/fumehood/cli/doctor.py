"""`fumehood doctor`: whether this machine can isolate code; imports typer, and what it examines when it runs."""

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from fumehood.cli.options import (
    ConfigOption,
    GuestSocketOption,
    Limits,
    LimitsOption,
    Mode,
    ModeOption,
    configured,
    require_linux,
)

if TYPE_CHECKING:
    from fumehood.sandboxd.probe import Report

EPILOG = "Exit code: 0 if code can be isolated here, with or without warnings, else 1."
_VERDICTS = {
    "namespaces": "Code can be isolated here",
    "pod": "Code can be run in the container, which is its wall",
    "unsafe-degraded": "Code can be run here, held by Landlock and a system-call filter only",
}


def doctor(
    context: typer.Context,
    config: ConfigOption = None,
    mode: ModeOption = Mode.NAMESPACES,
    limits: LimitsOption = Limits.ENFORCED,
    guest_socket: GuestSocketOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
) -> None:
    """Tell whether this machine can isolate code, and what to do about what is missing."""
    require_linux()
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
