"""`fumehood parts`: schemas, conversion and checks of message parts."""

import errno
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from fumehood.message_parts import Json, Part

EXIT_MALFORMED = 1
EXIT_UNUSABLE = 2

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
    from fumehood.message_parts import REPRESENTATIONS, read_published_schema

    if view not in REPRESENTATIONS:
        raise typer.BadParameter(f"there are {', '.join(REPRESENTATIONS)}", param_hint="VIEW")
    _write_stdout(read_published_schema(view).decode())


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
    from fumehood.message_parts import MalformedPartError, convert, list_formats, part_type_name

    for name, option in ((source, "--from"), (target, "--to")):
        if name not in list_formats():
            raise typer.BadParameter(f"there are {', '.join(list_formats())}", param_hint=option)
    document = _read_json(file)
    left_out: list[Part] = []
    try:
        written = json.dumps(convert(source, target, document, left_out), indent=2)
    except MalformedPartError as error:
        _exit_with_error(EXIT_MALFORMED, f"{_display_name(file)}: {error}")
    except RecursionError:
        _exit_with_error(EXIT_UNUSABLE, f"{_display_name(file)} is nested too deeply")
    _write_stdout(f"{written}\n")
    if left_out:
        types = ", ".join(dict.fromkeys(part_type_name(part) for part in left_out))
        said = "1 part has" if len(left_out) == 1 else f"{len(left_out)} parts have"
        verb = "is" if len(left_out) == 1 else "are"
        print(
            _escape_unprintable(f"{said} no words in {target} and {verb} left out: {types}"), file=sys.stderr
        )


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
    from fumehood.message_parts import validate

    problems = validate(_read_json(file), compat=compat)
    for problem in problems:
        print(_escape_unprintable(str(problem)), file=sys.stderr)
    if problems:
        raise typer.Exit(EXIT_MALFORMED)


# --- files --------------------------------------------------------------------------------------------


def _read_json(file: str) -> "Json":
    name = _display_name(file)
    try:
        return json.loads(
            _read_bytes(file),
            parse_constant=_reject_constant,
            parse_float=_parse_float,
            object_pairs_hook=_parse_object,
        )
    except OSError as error:
        _exit_with_error(EXIT_UNUSABLE, f"{name}: {error.strerror}")
    except RecursionError:
        _exit_with_error(EXIT_UNUSABLE, f"{name} is nested too deeply")
    except UnicodeDecodeError as error:
        _exit_with_error(
            EXIT_UNUSABLE, f"{name} is not JSON: at byte {error.start} it is not {error.encoding.upper()}"
        )
    except json.JSONDecodeError as error:
        _exit_with_error(EXIT_UNUSABLE, f"{name} is not JSON: {error}")
    except _LossyJson as error:
        _exit_with_error(EXIT_UNUSABLE, f"{name} is not JSON that can be read without loss: {error}")
    except ValueError:  # the only one left is Python's own, with advice that is of no use here
        _exit_with_error(
            EXIT_UNUSABLE, f"{name} is not JSON that can be read without loss: a number has too many digits"
        )


def _display_name(file: str) -> str:
    return "standard input" if file == "-" else file


def _read_bytes(file: str) -> bytes:
    if file != "-":
        return Path(file).read_bytes()
    if sys.stdin is None:  # a shell has closed it
        raise OSError(errno.EBADF, "it is closed")
    return sys.stdin.buffer.read()


class _LossyJson(Exception):
    """What Python reads in its own way, and would write otherwise."""


def _reject_constant(constant: str) -> "Json":
    raise _LossyJson(f"{constant} is no number of JSON")


def _parse_float(written: str) -> float:
    number = float(written)
    if math.isinf(number):
        raise _LossyJson(f"the number {written[:40]} is too large")
    if not number and written.lower().partition("e")[0].strip("-0."):
        raise _LossyJson(f"the number {written[:40]} is too small")
    return number


def _parse_object(pairs: "list[tuple[str, Json]]") -> "Json":
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise _LossyJson(f"an object has the member {twice[:40]!r} twice")
    return members


def _write_stdout(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        # What is left in the buffer would fail once more on the way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _exit_with_error(EXIT_UNUSABLE, f"standard output: {error.strerror}")


def _exit_with_error(code: int, message: str) -> NoReturn:
    print(_escape_unprintable(message), file=sys.stderr)
    raise typer.Exit(code)


def _escape_unprintable(text: str) -> str:
    """On one line, and nothing that a terminal would obey."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
