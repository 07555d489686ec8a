"""`fumehood serve`: the gateway from the command line; imports typer, and what it serves when it runs."""

import asyncio
import gc
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fumehood.cli.options import NOT_HERE

if TYPE_CHECKING:
    from fumehood.config import Config
    from fumehood.serving.sockets import Listener

_YOUNG_OBJECTS = 20_000  # how many more may be there before they are looked through
EPILOG = """\b
Settings come from --config FILE, and one by one from variables such as FUMEHOOD_SERVER__PORT; options come first, then
variables, then the file. config.example.yaml has all of them. Keys are never settings: name the variables that hold
them.

\b
Exit codes:
  0    it was stopped
  2    this command was used wrongly, or the configuration cannot be served
  125  code cannot be isolated here, or nobody can be served at that place
"""


def serve(
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", envvar="FUMEHOOD_CONFIG", help="Settings, as YAML; see docs/gateway.md."
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="HOST", show_default="127.0.0.1", help="Where to listen.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=0,
            max=65535,
            show_default="8080",
            help="Where to listen; 0 takes any free port.",
        ),
    ] = None,
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask this server for every model, e.g. http://127.0.0.1:8000/v1: any that has /chat/completions.",
        ),
    ] = None,
    upstream_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The variable that holds the key of --upstream."),
    ] = None,
    allow_unauthenticated: Annotated[
        bool,
        typer.Option(
            "--allow-unauthenticated",
            help="With auth.required: false in the settings, let other machines in without keys.",
        ),
    ] = False,
) -> None:
    """Serve the Responses API: any model behind it, with a code interpreter of its own.

    SIGTERM or Ctrl-C stops it in good order, a second one at once.
    """
    settings = _settings(config, host, port, upstream, upstream_key_env)
    if not (settings.server.private or settings.auth.required or allow_unauthenticated):
        raise typer.BadParameter(
            f"{settings.server.host} can be reached from other machines and auth.required is false: listen on "
            "127.0.0.1, or give --allow-unauthenticated to let everybody in",
            param_hint="--host",
        )
    from fumehood.sandboxd import logs

    logs.configure(
        settings.telemetry.log_format, logging.getLevelNamesMapping()[settings.telemetry.log_level.upper()]
    )
    raise typer.Exit(_run(settings))


def _settings(
    file: Path | None, host: str | None, port: int | None, upstream: str | None, key_variable: str | None
) -> "Config":
    from fumehood.config import Misconfigured, load

    given: dict[str, object] = {}
    if host is not None:
        given["server.host"] = host
    if port is not None:
        given["server.port"] = port
    if upstream is not None:
        model = {"match": "*", "base_url": upstream}
        given["models"] = [model if key_variable is None else {**model, "api_key_env": key_variable}]
    elif key_variable is not None:
        raise typer.BadParameter("it goes with --upstream", param_hint="--upstream-key-env")
    try:
        return load(file, os.environ, given)
    except Misconfigured as error:
        raise typer.BadParameter(str(error), param_hint="the configuration") from error


def _run(settings: "Config") -> int:
    from fumehood.config import Misconfigured
    from fumehood.protocol.errors import StorageCorrupted, StorageUnavailable
    from fumehood.serving.sockets import Address, CannotListen, listen
    from fumehood.wiring import CannotServe

    try:
        listener = listen(Address(settings.server.host, settings.server.port))
    except CannotListen as error:
        print(error, file=sys.stderr)
        return NOT_HERE
    try:
        _serve(settings, listener)
    except Misconfigured as error:
        print(error, file=sys.stderr)
        return 2
    except (CannotServe, StorageCorrupted, StorageUnavailable) as error:
        print(error, file=sys.stderr)
        return NOT_HERE
    finally:
        listener.close()
    return 0


def _serve(settings: "Config", listener: "Listener") -> None:
    import uvloop

    from fumehood.wiring import Assembled, serve

    def ready(parts: Assembled) -> None:
        _collect_less()
        print(_welcome(listener.where, direct=not settings.models, keys=not parts.open), flush=True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, os.environ, listener.sock, ready))


def _collect_less() -> None:
    """What is there when serving begins will stay, and a request leaves next to no cycles behind: looking for them as
    often as Python does takes a twentieth of all time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)


def _welcome(where: str, *, direct: bool, keys: bool) -> str:
    lines = [f"Serving the Responses API on {where}/v1", "", "Try it:"]
    key = ' -H "authorization: Bearer $OPENAI_API_KEY"' if keys else ""
    if direct:
        lines += [
            f"  curl {where}/v1/responses{key} -H 'content-type: application/json' -d '",
            '    {"model": "direct", "tools": [{"type": "code_interpreter"}], "stream": true,',
            '     "input": "```python\\nprint(6 * 7)\\n```"}\'',
            "",
            "No model is configured: `direct` runs the code that it is sent. Name a model server with --upstream URL.",
        ]
    else:
        lines += [
            f"  curl {where}/v1/models{key}",
            f"  OPENAI_BASE_URL={where}/v1 OPENAI_API_KEY={'fh-…' if keys else 'none'} python your_program.py",
        ]
    return "\n".join(lines)
