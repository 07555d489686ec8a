"""`fumehood doctor`: checks this host, a gateway's data, or a model server."""

import asyncio
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fumehood.cli.options import (
    GuestSocketOption,
    LimitsOption,
    ModeOption,
    detect_server_kind,
    exit_on_error,
    is_on_command_line,
    load_gateway_config,
    load_sandbox_settings,
    require_linux,
)

if TYPE_CHECKING:
    from fumehood.gateway_diagnostics import GatewayReport
    from fumehood.models.upstream_checks import UpstreamReport
    from fumehood.sandbox_server.diagnostics import HostReport
    from fumehood.store import DatabaseReport

EPILOG = """\b
Exit codes:
  0  this host can isolate code, the gateway can serve, the data is intact, or the model server can be used; there may
     be warnings
  1  it cannot, or the data is damaged
  2  invalid usage
"""
_HOST_OPTIONS = {"mode": "--mode", "limits": "--limits", "guest_socket": "--guest-socket"}
_STATE_STYLES = {"ok": "green", "warning": "yellow", "missing": "red", "damaged": "red"}
_VERDICTS = {
    "namespaces": "This host can isolate code",
    "pod": "This host can run code in the container, which isolates it",
    "unsafe-degraded": "This host can run code, confined by Landlock and a system-call filter only",
}


@exit_on_error()
def doctor(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="FUMEHOOD_SANDBOX_CONFIG",
            help="Settings of a gateway, to check all that it needs: cluster, sandboxes, model servers; or those of a "
            "sandbox server.",
        ),
    ] = None,
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
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Check a model server instead, e.g. http://127.0.0.1:8000/v1: send it trial requests.",
        ),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With --upstream: the environment variable with the server's API key."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default="the first one",
            help="With --upstream: the model to try, by the server's name.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
) -> None:
    """Check whether this host can isolate code, and print what to do about each problem.

    With --config and the settings of a gateway, check all that it needs instead: its cluster or sandbox server, and its
    model servers. With --data, check the stored data of a gateway instead. Nothing is changed; the gateway may be
    running. With --upstream, check a model server instead.
    """
    _check_option_groups(data=data, blobs=blobs, upstream=upstream, api_key_env=api_key_env, model=model)
    if upstream is not None:
        raise typer.Exit(_check_upstream(upstream, api_key_env, model, json))
    if data is not None:
        raise typer.Exit(_check_data(data, blobs, json))
    if config is not None and config.is_file() and detect_server_kind(config, "sandbox") == "gateway":
        for name, option in _HOST_OPTIONS.items():
            if is_on_command_line(context, name):
                message = "cannot be combined with the settings of a gateway, which decide"
                raise typer.BadParameter(message, param_hint=option)
        raise typer.Exit(_check_gateway(config, json))
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


def _check_option_groups(
    *, data: Path | None, blobs: Path | None, upstream: str | None, api_key_env: str | None, model: str | None
) -> None:
    if data is not None and upstream is not None:
        raise typer.BadParameter("excludes --data", param_hint="--upstream")
    for value, option, needed, base in (
        (blobs, "--blobs", "--data", data),
        (api_key_env, "--api-key-env", "--upstream", upstream),
        (model, "--model", "--upstream", upstream),
    ):
        if value is not None and base is None:
            raise typer.BadParameter(f"requires {needed}", param_hint=option)


def _check_gateway(file: Path, as_json: bool) -> int:
    from fumehood.gateway_diagnostics import diagnose_gateway

    config = load_gateway_config(file, None)
    logging.getLogger("fumehood").addHandler(logging.NullHandler())  # the findings contain all problems
    report = asyncio.run(diagnose_gateway(config, os.environ))
    verdict = "can serve" if report.is_usable else "cannot serve as it is"
    return _report(report, f"A gateway with {file} {verdict}.", passed=report.is_usable, as_json=as_json)


def _check_upstream(url: str, key_variable: str | None, model: str | None, as_json: bool) -> int:
    from fumehood.models import Secret, read_secret
    from fumehood.models.upstream_checks import diagnose_upstream

    logging.getLogger("fumehood").addHandler(logging.NullHandler())  # the findings contain all problems
    try:
        key = None if key_variable is None else Secret(read_secret(os.environ, key_variable))
    except KeyError:
        raise typer.BadParameter(
            f"the variable {key_variable} is not set", param_hint="--api-key-env"
        ) from None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--api-key-env") from None
    try:
        report = asyncio.run(diagnose_upstream(url, key, model))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--upstream") from None
    verdict = "can be used" if report.is_usable else "cannot be used as it is"
    return _report(
        report, f"The model server {verdict} ({report.base_url}).", passed=report.is_usable, as_json=as_json
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


def _report(
    report: "HostReport | DatabaseReport | UpstreamReport | GatewayReport",
    verdict: str,
    *,
    passed: bool,
    as_json: bool,
) -> int:
    """Print the report and return the exit code."""
    if as_json:
        import msgspec

        print(msgspec.json.encode(report).decode())
    else:
        _print_findings(report, verdict, passed=passed)
    return 0 if passed else 1


def _print_findings(
    report: "HostReport | DatabaseReport | UpstreamReport | GatewayReport", verdict: str, *, passed: bool
) -> None:
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
