"""`fumehood config`: checks the configuration of a server before it starts."""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from fumehood.cli.options import (
    DEFAULT_POOL,
    SANDBOX_LIMITS,
    LimitsChoice,
    ServerKind,
    detect_server_kind,
    exit_on_error,
)

if TYPE_CHECKING:
    from fumehood.gateway_config import GatewayConfig


_FILE_VARIABLES = {"gateway": "FUMEHOOD_CONFIG", "sandbox": "FUMEHOOD_SANDBOX_CONFIG"}
_SERVER_NAMES = {"gateway": "the gateway", "sandbox": "the sandbox server"}
EXIT_INVALID_CONFIG = 1

app = typer.Typer(
    help="Check the configuration of the gateway or of the sandbox server.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Exit codes: 0 the configuration is valid, 1 it is not, 2 invalid usage, or the file cannot be read.",
)


@app.callback()
def config() -> None:
    """Make `check` a subcommand."""


@app.command("check")
@exit_on_error()
def check(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            show_default="FUMEHOOD_CONFIG or FUMEHOOD_SANDBOX_CONFIG, else only variables",
            help="The YAML file of a gateway or of a sandbox server.",
        ),
    ] = None,
    server: Annotated[
        Literal["gateway", "sandbox"] | None,
        typer.Option(
            "--for",
            show_default="gateway, unless FILE has settings of the sandbox server",
            help="The server that would read it.",
        ),
    ] = None,
    show: Annotated[
        bool,
        typer.Option("--show", help="Print all settings that are in effect, as YAML, without secrets."),
    ] = False,
) -> None:
    """Check a configuration as the server would read it, with the variables that override the file.

    Each problem is one line that names the file or the variable, and the setting. Nothing is started or created.
    """
    file = file or _find_named_file(server or "gateway")
    kind = server or detect_server_kind(file)
    problems, settings, variables = _load(kind, file)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if problems:
        raise typer.Exit(EXIT_INVALID_CONFIG)
    for warning in _find_warnings(settings):
        print(f"warning: {warning}", file=sys.stderr)
    source = "The environment" if file is None else str(file)
    used = f" Variables that count: {', '.join(variables)}." if variables else ""
    verdict = f"{source} is a valid configuration of {_SERVER_NAMES[kind]}.{used}"
    print(verdict, file=sys.stderr if show else sys.stdout)
    if show:
        from fumehood.configuration import format_settings

        print(format_settings(_resolve_storage(settings)), end="")


def _find_named_file(kind: ServerKind) -> Path | None:
    name = os.environ.get(_FILE_VARIABLES[kind])
    return Path(name) if name else None


def _load(kind: ServerKind, file: Path | None) -> tuple[list[str], Any, tuple[str, ...]]:
    """The problems, the settings if there are none, and the variables that set some."""
    from fumehood.configuration import ConfigError, load_settings
    from fumehood.gateway_config import GATEWAY_SCHEMA
    from fumehood.sandbox_server.settings_loader import load_sandbox_config

    problems: list[str] = []
    limits = os.environ.get("FUMEHOOD_LIMITS", "enforced")
    if limits not in get_args(LimitsChoice):
        problems.append(f"FUMEHOOD_LIMITS: it is not one of {', '.join(get_args(LimitsChoice))}.")
        limits = "enforced"
    try:
        if kind == "sandbox":
            defaults: Mapping[str, object] = {"pool": DEFAULT_POOL, "limits": limits}
            loaded = load_sandbox_config(file, os.environ, defaults=defaults)
            return problems, loaded.settings, loaded.variables
        gateway = load_settings(GATEWAY_SCHEMA, file, os.environ, defaults={SANDBOX_LIMITS: limits})
        problems += _check_sandbox_config(gateway.settings)
        gateway.settings.storage.locate(os.environ)
    except ConfigError as error:
        return [*problems, *error.problems], None, ()
    return problems, gateway.settings, gateway.variables


def _check_sandbox_config(config: "GatewayConfig") -> list[str]:
    """The problems of the file that `sandbox_config` names, and of variables for the embedded server."""
    from fumehood.configuration import ConfigError
    from fumehood.sandbox_server.settings_loader import load_sandbox_config

    interpreter = config.providers.code_interpreter
    settings = interpreter.settings
    if not interpreter.enabled or settings.sandbox_url is not None or settings.claims_pods:
        return []
    named = interpreter.settings.sandbox_config
    try:
        load_sandbox_config(None if named is None else Path(named), os.environ)
    except ConfigError as error:
        return [*error.problems]
    return []


def _find_warnings(settings: Any) -> Iterator[str]:
    """What the server will need and does not find now; it may be there when the server starts."""
    from fumehood.gateway_config import GatewayConfig

    if not isinstance(settings, GatewayConfig):
        return
    interpreter = settings.providers.code_interpreter
    named = [
        *(
            (f"models[{number}].api_key_env", model.api_key_env)
            for number, model in enumerate(settings.models)
        ),
        ("compaction.keys_env", settings.compaction.keys_env),
        ("providers.code_interpreter.settings.sandbox_token_env", interpreter.settings.sandbox_token_env),
    ]
    for setting, variable in named:
        if variable is not None and not os.environ.get(variable, "").strip():
            yield f"{setting} names the variable {variable}, which is not set here."
    keys_file = settings.compaction.keys_file
    if keys_file is not None and not Path(keys_file).is_file():
        yield f"compaction.keys_file: there is no file {keys_file}."


def _resolve_storage(settings: Any) -> Any:
    """The settings with the paths that a gateway would use."""
    from msgspec.structs import replace

    from fumehood.gateway_config import GatewayConfig

    if not isinstance(settings, GatewayConfig):
        return settings
    location = settings.storage.locate(os.environ)
    storage = replace(
        settings.storage,
        directory=None,
        url=f"sqlite:///{location.database.absolute()}",
        blobs=str(location.blobs.absolute()),
    )
    return replace(settings, storage=storage)
