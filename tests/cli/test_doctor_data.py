"""`fumehood doctor --data` on data that a gateway has left, whole and damaged."""

import json
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import gateway_process
from tests.support.cli_runner import run_fumehood
from tests.support.gateway_process import ScriptedModelServer, text_answer

TABLES = {"responses", "items", "threads", "containers", "files", "uploads", "keys"}


def findings(data: Path, code: int, *more: str | Path) -> dict[str, dict[str, str]]:
    result = run_fumehood("doctor", "--data", data, "--json", *more)
    assert (result.returncode, result.stderr) == (code, ""), result.stdout
    report = json.loads(result.stdout)
    assert report["sound"] is (code == 0)
    return {finding["name"]: finding for finding in report["findings"]}


def states(found: dict[str, dict[str, str]]) -> set[str]:
    return {finding["state"] for finding in found.values()}


def without_code(model: ScriptedModelServer) -> dict[str, Any]:
    models = [{"match": "scripted", "base_url": model.url}]
    return {"models": models, "providers": {"code_interpreter": {"enabled": False}}}


def send_requests(running: gateway_process.GatewayProcess) -> None:
    """Two turns of a conversation, a container, an upload."""
    with httpx.Client(base_url=running.url, timeout=60) as client:
        first = client.post("/responses", json={"model": "scripted", "input": "a question"}).json()
        second = {"model": "scripted", "input": "another", "previous_response_id": first["id"]}
        assert client.post("/responses", json=second).json()["status"] == "completed"
        client.post("/containers", json={"name": "one"}).raise_for_status()
        upload = client.post(
            "/files", files={"file": ("a.txt", b"content of a file")}, data={"purpose": "user_data"}
        )
        upload.raise_for_status()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    with ScriptedModelServer() as model:
        model.script(text_answer("an answer"), text_answer("another answer"))
        with gateway_process.run_gateway(directory, without_code(model)) as running:
            send_requests(running)
    return directory


@pytest.fixture
def data(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-a", made, copy], check=True)
    return copy


def execute_sql(data: Path, statement: str) -> None:
    with closing(sqlite3.connect(data / "gateway.db", isolation_level=None)) as connection:
        assert connection.execute(statement).rowcount > 0


def find_blob(data: Path) -> Path:
    (found,) = (data / "blobs").glob("??/??/*")
    return found


def test_data_that_is_whole(data: Path) -> None:
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    found = findings(data, 0)
    assert states(found) == {"ok"}
    assert found.keys() >= {"gateway", "permissions", "schema", "pages", "blobs", "orphans", *TABLES}
    assert (found["responses"]["detail"], found["items"]["detail"]) == ("2 rows", "4 rows")
    assert found["uploads"]["detail"] == found["containers"]["detail"] == "1 rows"
    assert {path: path.read_bytes() for path in before} == before
    printed = run_fumehood("doctor", "--data", data / "gateway.db")
    assert printed.returncode == 0
    assert printed.stdout.splitlines()[-1].startswith("The stored data is intact (")


@pytest.mark.parametrize(
    ("table", "statement"),
    [
        ("items", "UPDATE items SET raw = x'ff00' WHERE pos = 1"),
        ("responses", "UPDATE responses SET body = CAST(replace(body, 'completed', 'cancelled') AS BLOB)"),
        ("responses", "DELETE FROM items WHERE pos = 1"),
        ("threads", "UPDATE threads SET parent = 99, parent_end = 1"),
        ("containers", "UPDATE containers SET record = x'7b'"),
        ("uploads", "UPDATE uploads SET record = x'7b'"),
    ],
)
def test_rows_that_are_damaged_are_named(data: Path, table: str, statement: str) -> None:
    execute_sql(data, statement)
    found = findings(data, 1)
    assert found[table]["state"] == "damaged"
    assert {name for name, finding in found.items() if finding["state"] == "damaged"} == {table}
    assert "restore a backup" in found[table]["advice"]


def test_pages_that_are_damaged(data: Path) -> None:
    path = data / "gateway.db"
    with closing(sqlite3.connect(path)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'items'").fetchone()
    content = bytearray(path.read_bytes())
    content[(page - 1) * 4096 : (page - 1) * 4096 + 100] = b"\xff" * 100
    path.write_bytes(content)
    assert findings(data, 1)["pages"]["state"] == "damaged"
    path.write_bytes(b"no database at all" * 1000)
    assert "not a database" in findings(data, 1)["database"]["detail"]


def test_blobs_that_are_missing_or_changed(data: Path) -> None:
    blob = find_blob(data)
    content = blob.read_bytes()
    blob.write_bytes(content[::-1])
    assert f"{blob.name}: its content does not match its name" in findings(data, 1)["blobs"]["detail"]
    blob.write_bytes(content + b"more")
    assert "it has 21 bytes, its record says 17" in findings(data, 1)["blobs"]["detail"]
    blob.unlink()
    assert f"1 of 1: {blob.name}: missing" in findings(data, 1)["blobs"]["detail"]


def test_blobs_that_nothing_refers_to_are_a_warning(data: Path) -> None:
    orphan = data / "blobs" / "ab" / "cd" / ("abcd" + "0" * 60)
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"x")
    (data / "blobs" / "incoming" / "unfinished").write_bytes(b"x")
    found = findings(data, 0)
    assert (found["orphans"]["state"], found["blobs"]["state"]) == ("warning", "ok")
    assert "1 unreferenced blobs, 1 incomplete ones" in found["orphans"]["detail"]


def test_blobs_elsewhere_and_of_somebody_else(data: Path, tmp_path: Path) -> None:
    (data / "blobs").rename(tmp_path / "elsewhere")
    assert findings(data, 1)["blobs"]["state"] == "damaged"
    assert states(findings(data, 0, "--blobs", tmp_path / "elsewhere")) == {"ok"}
    (tmp_path / "elsewhere" / "owner").write_text("somebody else")
    found = findings(data, 1, "--blobs", tmp_path / "elsewhere")
    assert "belongs to another database" in found["blobs"]["detail"]


def test_files_that_others_may_read_are_a_warning(data: Path) -> None:
    (data / "gateway.db").chmod(0o644)
    assert findings(data, 0)["permissions"]["state"] == "warning"


def test_a_newer_release(data: Path) -> None:
    execute_sql(data, "UPDATE compatibility SET since = 99")
    with closing(sqlite3.connect(data / "gateway.db")) as connection:
        connection.execute("PRAGMA user_version = 99")
    assert "newer release" in findings(data, 1)["schema"]["detail"]


def test_while_a_gateway_runs(tmp_path: Path) -> None:
    with ScriptedModelServer() as model:
        model.script(text_answer("an answer"), text_answer("another answer"))
        with gateway_process.run_gateway(tmp_path, without_code(model)) as running:
            send_requests(running)
            found = findings(tmp_path, 0)
            assert f"one is using it (process {running.process.pid})" in found["gateway"]["detail"]
            assert found["responses"]["detail"] == "2 rows"
            assert httpx.get(f"{running.url}/models").status_code == 200


def test_nothing_to_examine(tmp_path: Path) -> None:
    result = run_fumehood("doctor", "--data", tmp_path)
    assert result.returncode == 2
    assert "There is no database in" in " ".join(result.stderr.split())
    assert run_fumehood("doctor", "--blobs", tmp_path).returncode == 2


def test_help_describes_the_data_check() -> None:
    result = run_fumehood("doctor", "--help")
    assert "--data" in result.stdout
    assert "--blobs" in result.stdout
