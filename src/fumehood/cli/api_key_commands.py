"""`fumehood keys`: makes, lists and revokes API keys.

A gateway may be using the database meanwhile: it sees what has changed within seconds.
"""

import asyncio
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fumehood.interfaces import ApiKeyStore
    from fumehood.protocol.api_keys import ApiKeyLimits, ApiKeyRecord, ApiKeyScope

EXIT_NO_DATABASE = 125
_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_MAX_LABEL_LENGTH = 200

app = typer.Typer(
    help="API keys of the gateway: each belongs to a tenant, and tenants see nothing of each other.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Exit codes: 0 done, 1 there is no such key, 2 used wrongly, 125 the database cannot be used.",
)

type _StoreAction[T] = Callable[["ApiKeyStore"], Awaitable[T]]

GatewayConfigOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        envvar="FUMEHOOD_CONFIG",
        help="The gateway's settings: storage.url is where keys are.",
    ),
]


def _limit_option(help_text: str) -> Any:
    return typer.Option(metavar="N", min=1, show_default="the server's", help=help_text)


@app.command("create")
def create(
    config: GatewayConfigOption = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Whose key it is; keys of one tenant see the same responses and containers. Without it, the key is "
            "a tenant of its own.",
        ),
    ] = None,
    name: Annotated[str, typer.Option(metavar="LABEL", help="What the list calls it.")] = "",
    requests_per_minute: Annotated[
        int | None, _limit_option("Requests that it may send in a minute.")
    ] = None,
    concurrent: Annotated[
        int | None, _limit_option("Responses that it may have in the making at once.")
    ] = None,
    body_bytes: Annotated[int | None, _limit_option("The largest body of a request, in bytes.")] = None,
    containers: Annotated[int | None, _limit_option("Containers of its tenant that may run at once.")] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SCOPE",
            show_default="all but metrics",
            help="What it is for: responses, containers, files, models or metrics; may be given several times.",
        ),
    ] = None,
) -> None:
    """Make a key. Its secret is printed, this once, to standard output."""
    from fumehood.protocol.api_keys import (
        ApiKeyLimits,
        ApiKeyRecord,
        hash_secret,
        new_key_id,
        new_secret,
        secret_hint,
    )

    if tenant is not None and _TENANT_NAME.fullmatch(tenant) is None:
        raise typer.BadParameter("letters, digits and . _ @ -, at most 64", param_hint="--tenant")
    if len(name) > _MAX_LABEL_LENGTH or not name.isprintable():
        raise typer.BadParameter(
            f"at most {_MAX_LABEL_LENGTH} characters, all of them visible", param_hint="--name"
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
    _run_with_store(config, lambda store: store.add_api_key(key))
    print(secret)
    print(
        f"This is {key.id} of tenant {key.tenant}; its secret is not kept, so keep it now.", file=sys.stderr
    )


@app.command("list")
def list_keys(
    config: GatewayConfigOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Show all keys, revoked ones too, and never a secret."""
    keys = _run_with_store(config, lambda store: store.list_api_keys())
    if json:
        import msgspec

        for key in keys:
            print(msgspec.json.encode(_to_json_object(key)).decode())
        return
    if not keys:
        print("There are no keys; `fumehood keys create` makes one.", file=sys.stderr)
        return
    rows = [("ID", "SECRET", "TENANT", "CREATED", "REVOKED", "LIMITS", "SCOPES", "NAME")]
    rows += [
        (
            key.id,
            f"fh-…{key.hint}",
            "its own" if key.tenant == key.id else key.tenant,
            _format_time(key.created_at),
            "" if key.revoked_at is None else _format_time(key.revoked_at),
            " ".join([f"{name}={value}" for name, value in _limits_to_dict(key.limits).items()]),
            ",".join(_sort_scopes(key.scopes)),
            key.name,
        )
        for key in keys
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@app.command("revoke")
def revoke(
    key: Annotated[str, typer.Argument(metavar="ID", show_default=False, help="As `list` shows it.")],
    config: GatewayConfigOption = None,
) -> None:
    """Make a key worthless, for good. A running gateway refuses it within seconds; what runs already goes on."""
    if not _run_with_store(config, lambda store: store.revoke_api_key(key, time.time())):
        # What was given may be a secret, so it is not repeated.
        print(
            "There is no such key, or it was revoked before; `fumehood keys list` has them.", file=sys.stderr
        )
        raise typer.Exit(1)
    print(f"Revoked {key}.", file=sys.stderr)


def _run_with_store[T](file: Path | None, action: _StoreAction[T]) -> T:
    from fumehood.config import ConfigError, load_config
    from fumehood.protocol.openai.api_errors import ApiError
    from fumehood.store import SqliteStore, StoreOpenError

    try:
        path = load_config(file, os.environ).storage.database_path
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="the configuration") from error

    async def visit() -> T:
        store = await SqliteStore.open(path, shared=True)
        try:
            return await action(store)
        finally:
            await store.close()

    try:
        return asyncio.run(visit())
    except StoreOpenError as error:
        print(error, file=sys.stderr)
    except ApiError as error:
        print(error.message, file=sys.stderr)
    raise typer.Exit(EXIT_NO_DATABASE)


def _to_json_object(key: "ApiKeyRecord") -> dict[str, object]:
    return {
        "id": key.id,
        "tenant": key.tenant,
        "name": key.name,
        "hint": key.hint,
        "created_at": key.created_at,
        "revoked_at": key.revoked_at,
        "limits": _limits_to_dict(key.limits),
        "scopes": _sort_scopes(key.scopes),
    }


def _parse_scopes(names: list[str] | None) -> "frozenset[ApiKeyScope]":
    import msgspec

    from fumehood.protocol.api_keys import ALL_SCOPES, TENANT_SCOPES, ApiKeyScope

    if not names:
        return TENANT_SCOPES
    try:
        return msgspec.convert(names, frozenset[ApiKeyScope])
    except msgspec.ValidationError as error:
        raise typer.BadParameter(f"one of {', '.join(ALL_SCOPES)}", param_hint="--scope") from error


def _sort_scopes(scopes: "frozenset[ApiKeyScope]") -> "list[ApiKeyScope]":
    from fumehood.protocol.api_keys import ALL_SCOPES

    return [scope for scope in ALL_SCOPES if scope in scopes]


def _limits_to_dict(limits: "ApiKeyLimits") -> dict[str, int]:
    import msgspec

    return msgspec.to_builtins(limits)


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
