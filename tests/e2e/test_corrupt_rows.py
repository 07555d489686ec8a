"""What clients of a gateway see of rows that are damaged."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import httpx

from tests.e2e.conftest import make_client, make_settings_without_code
from tests.support import gateway_process
from tests.support.gateway_process import ScriptedModelServer, text_answer


def test_a_damaged_row_is_an_error_that_names_itself(tmp_path: Path) -> None:
    with ScriptedModelServer() as model:
        settings = make_settings_without_code(model)
        model.script(text_answer("whole"), text_answer("broken"))
        with gateway_process.run_gateway(tmp_path, settings) as running, make_client(running) as client:
            whole = client.responses.create(model="scripted", input="?")
            broken = client.responses.create(model="scripted", input="?")
        with closing(sqlite3.connect(tmp_path / "gateway.db", isolation_level=None)) as connection:
            damaged = connection.execute(
                "UPDATE items SET raw = CAST(replace(raw, 'broken', x'ff80fe') AS BLOB)"
                " WHERE instr(raw, CAST('broken' AS BLOB))"
            )
            assert damaged.rowcount == 1
        with (
            gateway_process.run_gateway(tmp_path, settings) as running,
            httpx.Client(base_url=running.url) as client,
        ):
            answers = [
                client.get(f"/responses/{broken.id}"),
                client.post(
                    "/responses",
                    json={"model": "scripted", "input": "?", "previous_response_id": broken.id},
                ),
            ]
            for refused in answers:
                assert refused.status_code == 500
                refused.content.decode()
                assert refused.json()["error"]["code"] == "storage_corrupted"
                assert "items 2/1" in refused.json()["error"]["message"]
            assert client.get(f"/responses/{whole.id}").json()["output"][0]["content"][0]["text"] == "whole"
            assert client.delete(f"/responses/{broken.id}").status_code == 200
            assert client.get(f"/responses/{broken.id}").status_code == 404
        lines = [json.loads(line) for line in running.output if line.startswith("{")]
        named = [line for line in lines if line["event"] == "storage_corrupted"]
        assert {(line["level"], line["table"], line["row"]) for line in named} == {("error", "items", "2/1")}
