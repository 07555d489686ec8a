"""A gateway whose sandboxes are pods of a cluster."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import INTERPRETER, OUTPUTS, make_client, make_settings, read_logs
from tests.support import gateway_process
from tests.support.gateway_process import ScriptedModelServer, code_call, text_answer
from tests.support.kubernetes.cluster import ClusterThread, run_cluster_thread
from tests.support.waiting import becomes_true


@pytest.fixture(scope="module")
def cluster() -> Generator[ClusterThread]:
    with run_cluster_thread(replicas=3) as running:
        yield running


@pytest.fixture(scope="module")
def model() -> Generator[ScriptedModelServer]:
    with ScriptedModelServer() as server:
        yield server


def _settings(
    cluster: ClusterThread, model: ScriptedModelServer, directory: Path, **interpreter: Any
) -> dict[str, Any]:
    chosen = cluster.cluster.interpreter_settings(directory, **interpreter)
    return make_settings(model) | {"providers": {"code_interpreter": {"settings": chosen}}}


def _ask(client: Any, **fields: Any) -> Any:
    fields = {"model": "scripted", "input": "?", "tools": [INTERPRETER], "include": OUTPUTS} | fields
    return client.responses.create(**fields)


def test_a_container_keeps_its_pod(
    cluster: ClusterThread, model: ScriptedModelServer, tmp_path: Path
) -> None:
    settings = _settings(cluster, model, tmp_path)
    with gateway_process.run_gateway(tmp_path, settings) as running, make_client(running) as client:
        model.script(code_call("x = 41\nopen('kept.txt', 'w').write('kept')"), text_answer("ok"))
        first = _ask(client)
        assert cluster.count_claims() == 1
    # Its pod outlives the gateway, and the next one on the same files finds it.
    assert cluster.count_claims() == 1
    with gateway_process.run_gateway(tmp_path, settings) as running, make_client(running) as client:
        model.script(code_call("print(x + 1, open('kept.txt').read())"), text_answer("42"))
        second = _ask(client, previous_response_id=first.id)
        assert read_logs(second) == "42 kept\n"
        (call,) = [item for item in second.output if item.type == "code_interpreter_call"]
        client.containers.delete(call.container_id)
        assert becomes_true(lambda: cluster.count_claims() == 0)
        assert not any("a-token-that-all-pods-share" in line for line in running.output)
