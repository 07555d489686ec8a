"""`fumehood keys`: creates, lists and revokes API keys.

The gateway may be running; it notices changes within seconds.
"""

import asyncio
import re
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fumehood.cli.options import (
    EXIT_UNAVAILABLE,
    CommandFailed,
    DataOption,
    GatewayConfigOption,
    exit_on_error,
    find_unused_data,
    load_gateway_config,
    locate_data,
)
from fumehood.cli.terminal_output import (
    JsonOption,
    TableColumns,
    TableRow,
    format_text,
    format_time,
    print_list,
    print_message,
)

if TYPE_CHECKING:
    from fumehood.interfaces import ApiKeyStore
    from fumehood.protocol.api_keys import ApiKeyRecord, ApiKeyScope

_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_MAX_LABEL_LENGTH = 200

app = typer.Typer(
    help="Manage API keys of the gateway. Each belongs to a tenant; tenants are isolated from each other.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Exit codes: 0 success, 1 no such key, 2 invalid usage, 125 the database is not usable.",
)

type _StoreAction[T] = Callable[["ApiKeyStore"], Awaitable[T]]


def _limit_option(help_text: str) -> Any:
    return typer.Option(metavar="N", min=1, show_default="the server's", help=help_text)


@app.command("create")
@exit_on_error()
def create(
    config: GatewayConfigOption = None,
    data: DataOption = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The tenant; its keys share responses, files and containers. Without it, the key gets a tenant of "
            "its own.",
        ),
    ] = None,
    name: Annotated[str, typer.Option(metavar="LABEL", help="A label for the list.")] = "",
    requests_per_minute: Annotated[int | None, _limit_option("Requests per minute.")] = None,
    concurrent: Annotated[int | None, _limit_option("Concurrent responses.")] = None,
    body_bytes: Annotated[int | None, _limit_option("The maximum size of a request body.")] = None,
    containers: Annotated[int | None, _limit_option("Running containers of the tenant.")] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SCOPE",
            show_default="all but metrics",
            help="What it permits: responses, containers, files, models or metrics; repeatable.",
        ),
    ] = None,
) -> None:
    """Create a key and print its secret to standard output. The secret is not stored."""
    from fumehood.protocol.api_keys import (
        ApiKeyLimits,
        ApiKeyRecord,
        hash_secret,
        new_key_id,
        new_secret,
        secret_hint,
    )

    if tenant is not None and _TENANT_NAME.fullmatch(tenant) is None:
        raise typer.BadParameter("must be letters, digits and . _ @ -, at most 64", param_hint="--tenant")
    if len(name) > _MAX_LABEL_LENGTH or not name.isprintable():
        raise typer.BadParameter(
            f"must be at most {_MAX_LABEL_LENGTH} printable characters", param_hint="--name"
        )
    secret, key_id = new_secret(), new_key_id()
    key = ApiKeyRecord(
        id=key_id,
        tenant=tenant or key_id,
        name=name,
        digest=hash_secret(secret.encode()),
        hint=secret_hint(secret),
        created_at=time.time(),
        limits=ApiKeyLimits(
            requests_per_minute=requests_per_minute,
            concurrent=concurrent,
            body_bytes=body_bytes,
            containers=containers,
        ),
        scopes=_parse_scopes(scope),
    )
    database = _find_database(config, data)
    _run_with_store(database, lambda store: store.add_api_key(key))
    print(secret)
    print(
        f"Created {key.id} of tenant {key.tenant} in {database}. The secret above is not stored: save it now.",
        file=sys.stderr,
    )


@app.command("list")
@exit_on_error()
def list_keys(
    config: GatewayConfigOption = None,
    data: DataOption = None,
    json: JsonOption = False,
) -> None:
    """List all keys, including revoked ones, without their secrets."""
    database = _find_database(config, data)
    rows: list[TableRow] = []
    if _exists(database):
        keys = _run_with_store(database, lambda store: store.list_api_keys())
        rows = [_to_row(key) for key in keys]
        message = f"There are no keys in {database}; create one with `fumehood keys create`."
    else:
        message = (
            f"There are no keys: {database} does not exist. `fumehood keys create` and `fumehood serve` create it; if "
            "your data is elsewhere, use --data DIR or --config FILE."
        )
    print_list(rows, False, _COLUMNS, as_json=json, empty_message=message)


@app.command("revoke")
@exit_on_error()
def revoke(
    key: Annotated[str, typer.Argument(metavar="ID", show_default=False, help="The id that `list` shows.")],
    config: GatewayConfigOption = None,
    data: DataOption = None,
) -> None:
    """Revoke a key permanently. A running gateway rejects it within seconds; running requests continue."""
    database = _find_database(config, data)
    if not _exists(database):
        raise CommandFailed(
            f"There is no such key: {database} does not exist. Use --data DIR or --config FILE."
        )
    if not _run_with_store(database, lambda store: store.revoke_api_key(key, time.time())):
        # Do not echo the argument: it may be a secret.
        raise CommandFailed(
            f"There is no such key in {database}, or it is already revoked; see `fumehood keys list`."
        )
    print(f"Revoked {key}.", file=sys.stderr)


def _find_database(file: Path | None, data: Path | None) -> Path:
    config = load_gateway_config(file, data)
    location = locate_data(config)
    if problem := find_unused_data(config, location):
        print_message(problem)
    return location.database


def _exists(database: Path) -> bool:
    try:
        database.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise CommandFailed(f"{database} cannot be read: {error.strerror}.", EXIT_UNAVAILABLE) from error
    return True


def _run_with_store[T](path: Path, action: _StoreAction[T]) -> T:
    from fumehood.protocol.openai.api_errors import ApiError
    from fumehood.store import SqliteStore, StoreOpenError

    async def run() -> T:
        store = await SqliteStore.open(path, shared=True)
        try:
            return await action(store)
        finally:
            await store.close()

    try:
        return asyncio.run(run())
    except StoreOpenError as error:
        raise CommandFailed(str(error), EXIT_UNAVAILABLE) from error
    except ApiError as error:
        raise CommandFailed(error.message, EXIT_UNAVAILABLE) from error


def _parse_scopes(names: list[str] | None) -> "frozenset[ApiKeyScope]":
    import msgspec

    from fumehood.protocol.api_keys import ALL_SCOPES, TENANT_SCOPES, ApiKeyScope

    if not names:
        return TENANT_SCOPES
    try:
        return msgspec.convert(names, frozenset[ApiKeyScope])
    except msgspec.ValidationError as error:
        raise typer.BadParameter(f"must be one of {', '.join(ALL_SCOPES)}", param_hint="--scope") from error


def _to_row(key: "ApiKeyRecord") -> TableRow:
    import msgspec

    from fumehood.protocol.api_keys import ALL_SCOPES

    return {
        "id": key.id,
        "tenant": key.tenant,
        "name": key.name,
        "hint": key.hint,
        "created_at": key.created_at,
        "revoked_at": key.revoked_at,
        "limits": msgspec.to_builtins(key.limits),
        "scopes": [scope for scope in ALL_SCOPES if scope in key.scopes],
    }


def _format_limits(row: TableRow) -> str:
    limits = cast("dict[str, int]", row["limits"])
    return " ".join([f"{name}={value}" for name, value in limits.items()])


_COLUMNS: TableColumns = {
    "ID": lambda row: format_text(row, "id"),
    "SECRET": lambda row: f"fh-…{row['hint']}",
    "TENANT": lambda row: "its own" if row["tenant"] == row["id"] else format_text(row, "tenant"),
    "CREATED": lambda row: format_time(row, "created_at"),
    "REVOKED": lambda row: format_time(row, "revoked_at"),
    "LIMITS": _format_limits,
    "SCOPES": lambda row: ",".join(cast("list[str]", row["scopes"])),
    "NAME": lambda row: format_text(row, "name"),
}
