"""`fumehood parts`: schemas, conversion and checks of message parts; imports typer, and the parts when it runs."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fumehood.parts.canonical import Json

MALFORMED = 1

app = typer.Typer(
    help="Tool calls as telemetry records them: any vendor's items as standard message parts, and back.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Exit codes: 0 done, 1 a part is malformed, 2 used wrongly.",
)

FileArgument = Annotated[
    str, typer.Argument(metavar="FILE|-", show_default=False, help="JSON; - reads standard input.")
]


@app.command("schema")
def schema(
    view: Annotated[str, typer.Argument(metavar="VIEW", show_default=False, help="option1, option2, …")],
) -> None:
    """Print the JSON Schema (2020-12) of a part of this view."""
    from fumehood.parts.forms import VIEWS
    from fumehood.parts.schemas import published

    if view not in VIEWS:
        raise typer.BadParameter(f"there are {', '.join(VIEWS)}", param_hint="VIEW")
    sys.stdout.write(published(view).decode())


@app.command("convert")
def convert(
    file: FileArgument,
    source: Annotated[str, typer.Option("--from", metavar="NAME", help="The vendor or view that it is of.")],
    target: Annotated[str, typer.Option("--to", metavar="NAME", help="The vendor or view to write.")],
) -> None:
    """Write one item, a list of items, a whole response or parts of a view as another vendor or view has them.

    What came from a vendor goes back to it unchanged, through any view.
    """
    from fumehood.parts.convert import convert, names
    from fumehood.parts.forms import Malformed

    for name, option in ((source, "--from"), (target, "--to")):
        if name not in names():
            raise typer.BadParameter(f"there are {', '.join(names())}", param_hint=option)
    document = _read(file)
    try:
        written = convert(source, target, document)
    except Malformed as error:
        print(error, file=sys.stderr)
        raise typer.Exit(MALFORMED) from error
    except RecursionError as error:
        raise typer.BadParameter(f"{file} is nested too deeply", param_hint="FILE") from error
    print(json.dumps(written, indent=2))


@app.command("validate")
def validate(
    file: FileArgument,
    compat: Annotated[
        bool,
        typer.Option(
            "--compat", help="Also take calls and responses as they were before their payloads had types."
        ),
    ] = False,
) -> None:
    """Check a part, a list of parts, or messages: the form of each, and that responses fit the calls before them."""
    from fumehood.parts.validate import validate

    problems = validate(_read(file), compat=compat)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        raise typer.Exit(MALFORMED)


def _refuse(constant: str) -> "Json":
    raise ValueError(f"{constant} is no number of JSON")


def _read(file: str) -> "Json":
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return json.loads(content, parse_constant=_refuse)
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}", param_hint="FILE") from error
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{file} is not JSON: {error}", param_hint="FILE") from error
