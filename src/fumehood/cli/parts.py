"""`fumehood parts`: schemas, conversion and checks of message parts; imports typer, and the parts when it runs."""

import errno
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from fumehood.parts.canonical import Json, Part

MALFORMED = 1
UNUSABLE = 2

app = typer.Typer(
    help="Tool calls as telemetry records them: any vendor's items as standard message parts, and back.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Exit codes: 0 done, 1 a part is malformed, 2 used wrongly, or a file that cannot be read or written.",
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
    _write(published(view).decode())


@app.command("convert", short_help="Write items or parts as another vendor or view has them.")
def convert(
    file: FileArgument,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="NAME",
            help="The vendor (openai, anthropic, …) or view (option2, …) that it is of.",
        ),
    ],
    target: Annotated[str, typer.Option("--to", metavar="NAME", help="The vendor or view to write.")],
) -> None:
    """Write one item, a list of items, a whole response or parts of a view as another vendor or view has them.

    What came from a vendor goes back to it unchanged, through any view. Parts that another vendor has no words for are
    left out; standard error says which.
    """
    from fumehood.parts.convert import convert, names
    from fumehood.parts.forms import Malformed
    from fumehood.parts.views import type_of

    for name, option in ((source, "--from"), (target, "--to")):
        if name not in names():
            raise typer.BadParameter(f"there are {', '.join(names())}", param_hint=option)
    document = _read(file)
    left_out: list[Part] = []
    try:
        written = json.dumps(convert(source, target, document, left_out), indent=2)
    except Malformed as error:
        _leave(MALFORMED, f"{_named(file)}: {error}")
    except RecursionError:
        _leave(UNUSABLE, f"{_named(file)} is nested too deeply")
    _write(f"{written}\n")
    if left_out:
        types = ", ".join(dict.fromkeys(type_of(part) for part in left_out))
        said = "1 part has" if len(left_out) == 1 else f"{len(left_out)} parts have"
        verb = "is" if len(left_out) == 1 else "are"
        print(_visible(f"{said} no words in {target} and {verb} left out: {types}"), file=sys.stderr)


@app.command("validate", short_help="Check parts or messages.")
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
        print(_visible(str(problem)), file=sys.stderr)
    if problems:
        raise typer.Exit(MALFORMED)


# --- files --------------------------------------------------------------------------------------------


def _read(file: str) -> "Json":
    name = _named(file)
    try:
        return json.loads(
            _content(file), parse_constant=_refuse, parse_float=_number, object_pairs_hook=_members
        )
    except OSError as error:
        _leave(UNUSABLE, f"{name}: {error.strerror}")
    except RecursionError:
        _leave(UNUSABLE, f"{name} is nested too deeply")
    except UnicodeDecodeError as error:
        _leave(UNUSABLE, f"{name} is not JSON: at byte {error.start} it is not {error.encoding.upper()}")
    except json.JSONDecodeError as error:
        _leave(UNUSABLE, f"{name} is not JSON: {error}")
    except _Unreadable as error:
        _leave(UNUSABLE, f"{name} is not JSON that can be read without loss: {error}")
    except ValueError:  # the only one left is Python's own, with advice that is of no use here
        _leave(UNUSABLE, f"{name} is not JSON that can be read without loss: a number has too many digits")


def _named(file: str) -> str:
    return "standard input" if file == "-" else file


def _content(file: str) -> bytes:
    if file != "-":
        return Path(file).read_bytes()
    if sys.stdin is None:  # a shell has closed it
        raise OSError(errno.EBADF, "it is closed")
    return sys.stdin.buffer.read()


class _Unreadable(Exception):
    """What Python reads in its own way, and would write otherwise."""


def _refuse(constant: str) -> "Json":
    raise _Unreadable(f"{constant} is no number of JSON")


def _number(written: str) -> float:
    number = float(written)
    if math.isinf(number):
        raise _Unreadable(f"the number {written[:40]} is too large")
    if not number and written.lower().partition("e")[0].strip("-0."):
        raise _Unreadable(f"the number {written[:40]} is too small")
    return number


def _members(pairs: "list[tuple[str, Json]]") -> "Json":
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise _Unreadable(f"an object has the member {twice[:40]!r} twice")
    return members


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        # What is left in the buffer would fail once more on the way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _leave(UNUSABLE, f"standard output: {error.strerror}")


def _leave(code: int, said: str) -> NoReturn:
    print(_visible(said), file=sys.stderr)
    raise typer.Exit(code)


def _visible(text: str) -> str:
    """On one line, and nothing that a terminal would obey."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
