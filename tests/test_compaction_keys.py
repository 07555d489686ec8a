"""Where the keys of compactions come from, and that they outlive a restart."""

import base64
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fumehood.gateway_config import ConfigError, GatewayConfig, load_config
from fumehood.interfaces import Caller
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.responses import CreateResponse
from fumehood.wiring import assemble_gateway

SEALED = "input[0].encrypted_content"
OLD, NEW = (base64.b64encode(letter * 32).decode() for letter in (b"o", b"n"))


def config(directory: Path, **compaction: str) -> GatewayConfig:
    given: dict[str, object] = {
        "storage.url": f"sqlite:///{directory}/gateway.db",
        "storage.blobs": str(directory / "blobs"),
        "providers.code_interpreter.enabled": False,
    }
    return load_config(None, {}, given | {f"compaction.{name}": value for name, value in compaction.items()})


def request(window: object) -> CreateResponse:
    return msgspec.json.decode(msgspec.json.encode({"model": "direct", "input": window}), type=CreateResponse)


async def compacted(config: GatewayConfig, environ: Mapping[str, str] | None = None) -> list[Any]:
    """A window that a gateway of its own has made; the model `direct` has the same summary for everything."""
    async with assemble_gateway(config, environ or {}) as parts:
        answer = await parts.runs.compact(request("Hi"), Caller())
    return msgspec.json.decode(msgspec.json.encode(answer.output))


async def refusal(
    window: object, config: GatewayConfig, environ: Mapping[str, str] | None = None
) -> str | None:
    """What a gateway of its own finds wrong; None if it opens the window."""
    async with assemble_gateway(config, environ or {}) as parts:
        try:
            await parts.runs.count_tokens(request(window), Caller())
        except InvalidRequest as error:
            return error.param
    return None


async def test_with_no_keys_given_one_is_made_beside_the_store(tmp_path: Path) -> None:
    window = await compacted(config(tmp_path))
    made = tmp_path / "gateway.db.keys"
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert await refusal(window, config(tmp_path)) is None
    made.unlink()
    assert await refusal(window, config(tmp_path)) == SEALED


async def test_keys_are_changed_by_putting_the_new_one_first(tmp_path: Path) -> None:
    chosen = config(tmp_path, keys_env="KEYS")
    window = await compacted(chosen, {"KEYS": OLD})
    assert await refusal(window, chosen, {"KEYS": f"{NEW},{OLD}"}) is None
    assert await refusal(window, chosen, {"KEYS": NEW}) == SEALED
    file = tmp_path / "keys"
    file.write_text(f"{NEW}\n{OLD}\n")
    file.chmod(0o600)
    assert await refusal(window, config(tmp_path, keys_file=str(file))) is None
    assert not (tmp_path / "gateway.db.keys").exists()


async def test_a_window_is_worth_nothing_to_another_tenant(tmp_path: Path) -> None:
    async with assemble_gateway(config(tmp_path), {}) as parts:
        answer = await parts.runs.compact(request("Hi"), Caller("one"))
        window = msgspec.json.decode(msgspec.json.encode(answer.output))
        assert (await parts.runs.count_tokens(request(window), Caller("one"))).input_tokens > 0
        with pytest.raises(InvalidRequest) as refused:
            await parts.runs.start(request(window), Caller("two"))
        assert refused.value.param == SEALED


@pytest.mark.parametrize("keys", ["", "short", f"{OLD} not!base64"])
async def test_wrong_keys_are_refused_before_anything_is_served(tmp_path: Path, keys: str) -> None:
    with pytest.raises(ConfigError, match="KEYS") as refused:
        await compacted(config(tmp_path, keys_env="KEYS"), {"KEYS": keys})
    assert OLD not in str(refused.value)


def test_one_place_for_keys_is_enough(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set only one of them"):
        config(tmp_path, keys_env="KEYS", keys_file="keys")
