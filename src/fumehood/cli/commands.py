"""All commands under one name; imports typer and siblings, which import what a command needs when it runs."""

import os
from typing import Annotated

import typer

from fumehood import __version__
from fumehood.cli import containers, doctor, execute, keys, parts, sandbox, serve, uploads

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
    epilog=serve.EPILOG,
    short_help="Serve the Responses API, with a code interpreter.",
)(serve.serve)
app.add_typer(keys.app, name="keys", short_help="API keys of the gateway.")
app.add_typer(containers.app, name="containers")
app.add_typer(uploads.app, name="files")
app.add_typer(parts.app, name="parts", short_help="Tool calls as telemetry records them, of any vendor.")
app.command("sandbox", epilog=sandbox.EPILOG, short_help="Serve sandboxes to a gateway or any program.")(
    sandbox.sandbox
)
app.command("exec", epilog=execute.EPILOG, short_help="Run Python in a sandbox of its own.")(execute.execute)
app.command("doctor", epilog=doctor.EPILOG, short_help="Tell whether this machine can isolate code.")(
    doctor.doctor
)
