"""`fumehood keys`, beside a gateway that runs and without one."""

import fcntl
import json
import sqlite3
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fumehood.store.migrations import MIGRATIONS, migrate
from tests.support import gateway_process
from tests.support.cli_runner import CommandResult, run_command
from tests.support.waiting import becomes_true

NO_CODE: dict[str, Any] = {"providers": {"code_interpreter": {"enabled": False}}}
TIMEOUT_SECONDS = 60.0


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data directory of these tests; nothing is written where they are started."""
    directory = tmp_path / "share" / "fumehood"
    monkeypatch.setenv("XDG_DATA_HOME", str(directory.parent))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return directory


def run_keys(*arguments: str) -> CommandResult:
    return run_command("keys", *arguments)


def list_keys(*arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_keys("list", "--json", *arguments).out.splitlines()]


def read_all_bytes(directory: Path) -> bytes:
    return b"".join(file.read_bytes() for file in directory.glob("*.db*"))


def test_a_key_is_created_listed_and_revoked(data: Path) -> None:
    result = run_keys("create", "--tenant", "acme", "--name", "a lap-top", "--concurrent", "3")
    assert result.code == 0
    secret = result.out
    assert secret.startswith("fh-")
    assert len(secret) == 46
    (key,) = list_keys()
    assert key["id"] in result.err
    assert (key["tenant"], key["name"], key["limits"]) == ("acme", "a lap-top", {"concurrent": 3})
    assert secret.endswith(key["hint"])
    assert secret not in result.err + run_keys("list").out
    assert secret.encode() not in read_all_bytes(data)
    assert list(Path().iterdir()) == []
    assert run_keys("revoke", key["id"]).code == 0
    assert list_keys()[0]["revoked_at"] is not None
    assert key["id"] in run_keys("list").out


def test_keys_have_scopes() -> None:
    run_keys("create", "--scope", "metrics")
    run_keys("create", "--concurrent", "2", "--scope", "models", "--scope", "responses", "--scope", "models")
    run_keys("create")
    assert [key["scopes"] for key in list_keys()] == [
        ["metrics"],
        ["responses", "models"],
        ["responses", "containers", "files", "models"],
    ]
    assert "concurrent=2  responses,models" in run_keys("list").out


def test_a_key_without_a_tenant_has_its_own() -> None:
    assert run_keys("create").out != run_keys("create").out
    first, second = list_keys()
    assert first["tenant"] == first["id"] != second["tenant"] == second["id"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["create", "--tenant", "a/b"], "letters, digits"),
        (["create", "--tenant", ""], "letters, digits"),
        (["create", "--name", "a\nb"], "printable"),
        (["create", "--concurrent", "0"], "--concurrent"),
        (["create", "--scope", "everything"], "one of responses, containers, files, models, metrics"),
        (["create", "--scope", "metrics", "--scope", ""], "one of responses"),
        (["list", "--config", "none.yaml"], "none.yaml: No such file or directory."),
    ],
)
def test_invalid_usage(arguments: list[str], words: str) -> None:
    result = run_keys(*arguments)
    assert result.code == 2
    assert words in result.err
    assert not list(Path().parent.rglob("*.db"))


def test_revoke_does_not_print_an_unknown_id() -> None:
    secret = run_keys("create").out
    result = run_keys("revoke", secret)
    assert result.code == 1
    assert secret not in result.err + result.out


def test_reading_creates_no_database(tmp_path: Path, data: Path) -> None:
    result = run_keys("list")
    assert (result.code, result.out) == (0, "")
    assert f"There are no keys: {data}/fumehood.db does not exist." in result.err
    assert run_keys("list", "--json").streams[:2] == (0, "")
    result = run_keys("revoke", "key_1f0c2a9be4d03377")
    assert (result.code, f"{data}/fumehood.db does not exist" in result.err) == (1, True)
    assert run_keys("list", "--data", str(tmp_path / "elsewhere")).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["work"]
    assert list(Path().iterdir()) == []


def test_keys_in_a_directory_of_ones_own(tmp_path: Path) -> None:
    directory = tmp_path / "here"
    result = run_keys("create", "--data", str(directory))
    assert f"in {directory}/fumehood.db" in result.err
    assert len(list_keys("--data", str(directory))) == 1
    config = tmp_path / "config.yaml"
    config.write_text(f"storage: {{directory: {directory}}}\n")
    assert len(list_keys("--config", str(config))) == 1
    config.write_text(f"storage: {{url: 'sqlite:///{directory}/fumehood.db'}}\n")
    assert len(list_keys("--config", str(config))) == 1
    assert list_keys("--config", str(config), "--data", str(tmp_path / "other")) == []
    assert list_keys() == []


def test_an_earlier_database_in_the_working_directory_is_named() -> None:
    Path("fumehood.db").touch()
    for arguments in (["list"], ["create"]):
        result = run_keys(*arguments)
        assert f"{Path.cwd()}/fumehood.db is not used" in result.err
        assert f"start with --data {Path.cwd()}." in result.err
    assert "is not used" not in run_keys("list", "--data", ".").err


def test_a_directory_that_others_own_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run_keys("create", "--data", str(tmp_path / "file" / "data"))
    assert (result.code, "cannot be opened" in result.err) == (125, True)


def _downgrade_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        migrate(connection, MIGRATIONS[:1])


def test_a_database_of_an_older_release_is_migrated(data: Path) -> None:
    data.mkdir(parents=True)
    _downgrade_database(data / "fumehood.db")
    assert run_keys("create").code == 0
    assert len(list_keys()) == 1


def test_a_database_in_use_by_another_release_is_not_opened(data: Path) -> None:
    data.mkdir(parents=True)
    _downgrade_database(data / "fumehood.db")
    with (data / "fumehood.db.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711\n")
        lock.flush()
        result = run_keys("create")
    assert result.code == 125
    assert result.out == ""
    assert "a gateway of another release is using it (process 4711)" in result.err


# --- beside a gateway that runs -----------------------------------------------------------------------


def ask(url: str, key: str | None) -> tuple[int, Any]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.loads(refused.read())


def wait_for_status(url: str, key: str | None, status: int) -> None:
    assert becomes_true(lambda: ask(url, key)[0] == status, TIMEOUT_SECONDS)


def test_keys_are_made_and_revoked_beside_a_gateway(tmp_path: Path) -> None:
    with gateway_process.run_gateway(tmp_path, NO_CODE) as running:
        models = f"{running.url}/models"
        config = ("--config", str(tmp_path / "config.json"))
        assert ask(models, None)[0] == 200
        secret = run_keys("create", *config).out
        wait_for_status(models, None, 401)  # there is a key now, so one is needed
        newest = run_keys("create", *config).out
        wait_for_status(models, newest, 200)
        assert ask(models, secret)[0] == 200
        assert ask(running.url.replace("/v1", "/healthz"), None)[0] == 200
        status, body = ask(models, "fh-wrong")
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        for key in list_keys(*config):
            assert run_keys("revoke", key["id"], *config).code == 0
        wait_for_status(models, secret, 401)
        assert ask(models, newest)[0] == 401
        assert ask(models, None)[0] == 401
    output = "".join(running.output)
    assert list_keys(*config)[0]["id"] in output
    for word in (secret, newest, "fh-wrong", secret[-12:]):
        assert word not in output
