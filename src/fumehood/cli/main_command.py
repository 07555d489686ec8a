"""The command `fumehood` with all its subcommands."""

import os
from typing import Annotated

import typer

from fumehood import __version__
from fumehood.cli import (
    api_key_commands,
    config_commands,
    container_commands,
    doctor_command,
    file_commands,
    message_part_commands,
    sandbox_command,
    serve_command,
)
from fumehood.cli.exec import exec_command

app = typer.Typer(
    help="An open, self-hosted code interpreter: runs untrusted Python in isolated sandboxes.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    _open_standard_descriptors()
    app(prog_name="fumehood")


def _open_standard_descriptors() -> None:
    """Open descriptors 0 to 2 if the caller closed them; else the next opened file would become one of them."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _print_version(value: bool) -> None:
    if value:
        print(f"fumehood {__version__}")
        raise typer.Exit


@app.callback()
def fumehood(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Handle the options of `fumehood` itself."""
    del version


# The list of commands has room for about sixty characters each.
app.command(
    "serve",
    epilog=serve_command.EPILOG,
    short_help="Serve the Responses API, with a code interpreter.",
)(serve_command.serve)
app.add_typer(api_key_commands.app, name="keys", short_help="Manage the API keys of the gateway.")
app.add_typer(config_commands.app, name="config", short_help="Check the configuration of a server.")
app.add_typer(container_commands.app, name="containers")
app.add_typer(file_commands.app, name="files")
app.add_typer(
    message_part_commands.app, name="parts", short_help="Convert and check tool calls as message parts."
)
app.command(
    "sandbox", epilog=sandbox_command.EPILOG, short_help="Serve sandboxes to a gateway or another program."
)(sandbox_command.sandbox)
app.command("exec", epilog=exec_command.EPILOG, short_help="Run Python code in a new sandbox.")(
    exec_command.execute
)
app.command("doctor", epilog=doctor_command.EPILOG, short_help="Check whether this host can isolate code.")(
    doctor_command.doctor
)
