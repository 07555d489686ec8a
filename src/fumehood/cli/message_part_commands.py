"""`fumehood parts`: converts, validates and describes message parts."""

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
    help="Convert tool calls of any vendor to OpenTelemetry message parts and back, and check them.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Exit codes: 0 success, 1 a part is malformed, 2 invalid usage or a file that cannot be read or written.",
)

FileArgument = Annotated[
    str, typer.Argument(metavar="FILE|-", show_default=False, help="A JSON file; - reads standard input.")
]


@app.command("schema")
def schema(
    view: Annotated[str, typer.Argument(metavar="VIEW", show_default=False, help="option1, option2, …")],
) -> None:
    """Print the JSON Schema (2020-12) of the parts of a view."""
    from fumehood.message_parts import REPRESENTATIONS, read_published_schema

    if view not in REPRESENTATIONS:
        raise typer.BadParameter(f"must be one of {', '.join(REPRESENTATIONS)}", param_hint="VIEW")
    _write_stdout(read_published_schema(view).decode())


@app.command("convert", short_help="Convert items or parts to another vendor or view.")
def convert(
    file: FileArgument,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="NAME",
            help="The vendor (openai, anthropic, …) or view (option2, …) of the input.",
        ),
    ],
    target: Annotated[str, typer.Option("--to", metavar="NAME", help="The vendor or view of the output.")],
) -> None:
    """Convert an item, a list of items, a whole response or parts of a view to another vendor or view.

    Converting to a view and back to the same vendor is lossless. Parts that the target vendor cannot express are
    dropped and listed on standard error.
    """
    from fumehood.message_parts import MalformedPartError, convert, list_formats, part_type_name

    for name, option in ((source, "--from"), (target, "--to")):
        if name not in list_formats():
            raise typer.BadParameter(f"must be one of {', '.join(list_formats())}", param_hint=option)
    document = _read_json(file)
    dropped: list[Part] = []
    try:
        output = json.dumps(convert(source, target, document, dropped), indent=2)
    except MalformedPartError as error:
        _exit_with_error(EXIT_MALFORMED, f"{_display_name(file)}: {error}")
    except RecursionError:
        _exit_with_error(EXIT_UNUSABLE, f"{_display_name(file)} is nested too deeply")
    _write_stdout(f"{output}\n")
    if dropped:
        types = ", ".join(dict.fromkeys(part_type_name(part) for part in dropped))
        count = "1 part" if len(dropped) == 1 else f"{len(dropped)} parts"
        print(
            _escape_unprintable(f"{count} dropped, which {target} cannot express: {types}"), file=sys.stderr
        )


@app.command("validate", short_help="Check parts or messages.")
def validate(
    file: FileArgument,
    compat: Annotated[
        bool,
        typer.Option("--compat", help="Also accept calls and responses from before payloads had types."),
    ] = False,
) -> None:
    """Check a part, a list of parts, or messages: each part, and that responses match earlier calls."""
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
    except ValueError:  # Python's limit of digits
        _exit_with_error(
            EXIT_UNUSABLE, f"{name} is not JSON that can be read without loss: a number has too many digits"
        )


def _display_name(file: str) -> str:
    return "standard input" if file == "-" else file


def _read_bytes(file: str) -> bytes:
    if file != "-":
        return Path(file).read_bytes()
    if sys.stdin is None:  # closed by the shell
        raise OSError(errno.EBADF, "it is closed")
    return sys.stdin.buffer.read()


class _LossyJson(Exception):
    """JSON that Python would not write back unchanged."""


def _reject_constant(constant: str) -> "Json":
    raise _LossyJson(f"{constant} is not a JSON number")


def _parse_float(output: str) -> float:
    number = float(output)
    if math.isinf(number):
        raise _LossyJson(f"the number {output[:40]} is too large")
    if not number and output.lower().partition("e")[0].strip("-0."):
        raise _LossyJson(f"the number {output[:40]} is too small")
    return number


def _parse_object(pairs: "list[tuple[str, Json]]") -> "Json":
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        duplicate = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise _LossyJson(f"an object has the member {duplicate[:40]!r} twice")
    return members


def _write_stdout(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        # The rest of the buffer would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _exit_with_error(EXIT_UNUSABLE, f"standard output: {error.strerror}")


def _exit_with_error(code: int, message: str) -> NoReturn:
    print(_escape_unprintable(message), file=sys.stderr)
    raise typer.Exit(code)


def _escape_unprintable(text: str) -> str:
    """Escape newlines and control characters."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
