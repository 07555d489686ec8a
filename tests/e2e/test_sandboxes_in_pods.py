"""A gateway whose sandboxes are pods of a cluster."""

import time
import urllib.request
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.conftest import INTERPRETER, OUTPUTS, make_client, make_settings, read_logs
from tests.support import gateway_process
from tests.support.gateway_process import (
    GatewayProcess,
    ScriptedModelServer,
    code_call,
    text_answer,
    tool_call,
    tool_calls,
)
from tests.support.kubernetes.cluster import TEMPLATE, Cluster, ClusterThread, run_cluster_thread
from tests.support.kubernetes.pods import RelayedPods
from tests.support.prometheus_page import MetricsPage
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


def read_metrics(running: GatewayProcess) -> MetricsPage:
    with urllib.request.urlopen(running.url.removesuffix("/v1") + "/metrics", timeout=30) as answer:
        return MetricsPage.parse(answer.read().decode())


def running_calls(running: GatewayProcess) -> float:
    return read_metrics(running).value("fumehood_container_calls_running")


def count_executions(cluster: Cluster) -> int:
    assert isinstance(cluster.host, RelayedPods)
    return cluster.host.running_executions


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


def test_each_call_has_a_pod(cluster: ClusterThread, model: ScriptedModelServer, tmp_path: Path) -> None:
    """Specification 003, US3 and EC-4: a claim for each call, parallel ones too, deleted when it has ended."""
    settings = _settings(cluster, model, tmp_path, isolation="execution", sandbox_warm_pool=None)
    settings["providers"]["code_interpreter"]["settings"]["sandbox_template"] = TEMPLATE
    code = "import time\nopen('made.txt', 'w').write('x')\ntime.sleep(0.2)\nprint('done')"
    earlier = len(cluster.call(lambda running: running.controller.addresses))
    with gateway_process.run_gateway(tmp_path, settings) as running, make_client(running) as client:
        calls = [
            tool_call("code_interpreter", {"code": code}, call_id=f"call_{number}", index=number)
            for number in range(3)
        ]
        model.script(tool_calls(*calls), text_answer("ok"))
        response = _ask(client)
        found = [item for item in response.output if item.type == "code_interpreter_call"]
        assert [item.outputs[0].logs for item in found] == ["done\n"] * 3
        assert cluster.count_claims() == 0
        addresses = cluster.call(lambda running: running.controller.addresses[earlier:])
        assert len(set(addresses)) == len(addresses) == 3
        metrics = read_metrics(running)
        starts = ("warm", "cold")
        assert (
            sum(metrics.value("fumehood_claim_duration_seconds_count", start=start) for start in starts) == 3
        )
        assert metrics.value("fumehood_claims_open") == metrics.value("fumehood_claims_in_flight") == 0


def test_the_model_is_told_when_there_is_no_pod(
    cluster: ClusterThread, model: ScriptedModelServer, tmp_path: Path
) -> None:
    """Specification 003, US3-3 and FR-011: after `claim_timeout`, and the claim is gone."""
    settings = _settings(cluster, model, tmp_path, claim_timeout=1)
    with gateway_process.run_gateway(tmp_path, settings) as running, make_client(running) as client:
        cluster.call(lambda found: setattr(found.controller.behaviour, "is_paused", True))
        try:
            model.script(code_call("print(1)"), text_answer("sorry"))
            started_at = time.monotonic()
            response = _ask(client)
            assert 1 <= time.monotonic() - started_at < 3
            assert response.output_text == "sorry"
            told = model.requests[-1].json["messages"][-1]["content"]
            assert "No sandbox is free at the moment, try again later" in told
            assert becomes_true(lambda: cluster.count_claims() == 0)
        finally:
            cluster.call(lambda found: setattr(found.controller.behaviour, "is_paused", False))


@pytest.mark.parametrize("isolation", ["container", "execution"])
def test_a_pod_that_crashes_in_mid_call(
    cluster: ClusterThread, model: ScriptedModelServer, tmp_path: Path, isolation: str
) -> None:
    """Specification 003, EC-1: the claim is deleted, the model is told, and the next call has a fresh sandbox."""
    settings = _settings(cluster, model, tmp_path, isolation=isolation)
    with gateway_process.run_gateway(tmp_path, settings) as running, make_client(running) as client:
        model.script(code_call("open('kept.txt', 'w').write('kept')"), text_answer("ok"))
        first = _ask(client)
        model.script(
            code_call("import time\ntime.sleep(60)"),
            code_call("print(open('kept.txt').read())"),
            text_answer("done"),
        )
        with ThreadPoolExecutor(1) as executor:
            asking = executor.submit(lambda: _ask(client, previous_response_id=first.id))
            assert becomes_true(lambda: cluster.call(count_executions) == 1)
            (claim,) = cluster.call(lambda found: found.ready_claims)
            cluster.run(lambda found: found.controller.kill_pod(claim))
            response = asking.result(60)
        (lost, again) = [item for item in response.output if item.type == "code_interpreter_call"]
        assert lost.container_id == again.container_id == first.output[0].container_id
        assert lost.status == "failed"
        assert again.outputs[0].logs.endswith("kept\n")
        told = model.requests[1].json["messages"][-1]["content"]
        assert "The sandbox was lost" in told
        client.containers.delete(again.container_id)
    assert cluster.count_claims() == 0


def test_a_killed_gateway_leaves_no_claim(
    cluster: ClusterThread, model: ScriptedModelServer, tmp_path: Path
) -> None:
    settings = _settings(cluster, model, tmp_path, isolation="execution")
    with gateway_process.run_gateway(tmp_path, settings) as running, make_client(running) as client:
        model.script(code_call("import time\ntime.sleep(60)"))
        with ThreadPoolExecutor(1) as executor:
            asking = executor.submit(lambda: _ask(client))
            assert becomes_true(lambda: running_calls(running) == 1 and cluster.count_claims() == 1)
            running.kill()
            with pytest.raises(openai.APIConnectionError):
                asking.result(60)
    assert cluster.count_claims() == 1
    with gateway_process.run_gateway(tmp_path, settings) as running:
        assert becomes_true(lambda: cluster.count_claims() == 0)
        assert becomes_true(
            lambda: read_metrics(running).value("fumehood_container_orphans_destroyed_total") == 1
        )
