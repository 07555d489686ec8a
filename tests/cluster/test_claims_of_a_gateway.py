"""A gateway claims real pods, and leaves no claim behind (specification 003)."""

import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.cluster_sandboxes import ClusterSandboxes, ask, install_sandboxes, logs_of
from tests.support.gateway_process import ScriptedModelServer, code_call, text_answer
from tests.support.kubectl import Kubectl
from tests.support.waiting import becomes_true

_REPLICAS = 3
_POD_NAME = "import os\nprint(os.uname().nodename)"


@pytest.fixture(scope="module")
def sandboxes(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> ClusterSandboxes:
    return install_sandboxes(kubectl, tmp_path_factory.mktemp("sandboxes"), replicas=_REPLICAS)


@pytest.fixture(autouse=True)
def no_claim_is_left(sandboxes: ClusterSandboxes) -> Generator[None]:
    assert sandboxes.claims() == set()
    yield
    assert sandboxes.claims() == set()


@pytest.mark.timeout(1800)
def test_a_hundred_executions_use_a_pod_each(sandboxes: ClusterSandboxes, tmp_path: Path) -> None:
    sandboxes.wait_until_full()
    with sandboxes.run_gateway(tmp_path, isolation="execution", claim_timeout=120) as gateway:
        pods = [logs_of(ask(gateway.url, _POD_NAME)).strip() for _ in range(100)]
        assert becomes_true(lambda: not sandboxes.claims(), 10)
    assert (
        len(set(pods)) == 100
    )  # warm ones have the names of their sandboxes, cold ones those of their claims


def test_ten_executions_at_once_use_ten_pods(sandboxes: ClusterSandboxes, tmp_path: Path) -> None:
    sandboxes.wait_until_full()
    with sandboxes.run_gateway(tmp_path, isolation="execution", claim_timeout=240) as gateway:
        with ThreadPoolExecutor(10) as threads:
            asked = [threads.submit(ask, gateway.url, _POD_NAME) for _ in range(10)]
            pods = {logs_of(each.result()).strip() for each in asked}
        assert len(pods) == 10
        assert becomes_true(lambda: not sandboxes.claims(), 10)


def test_a_container_keeps_its_pod_until_it_is_deleted(sandboxes: ClusterSandboxes, tmp_path: Path) -> None:
    sandboxes.wait_until_full()
    with sandboxes.run_gateway(tmp_path) as gateway:
        made = httpx.post(f"{gateway.url}/containers", json={"name": "kept"}, timeout=60).json()["id"]
        first = logs_of(ask(gateway.url, f"x = 41\n{_POD_NAME}", container=made))
        second = logs_of(ask(gateway.url, f"print(x + 1)\n{_POD_NAME}", container=made))
        assert second == f"42\n{first}"
        assert len(sandboxes.claims()) == 1
        began = time.monotonic()
        assert httpx.delete(f"{gateway.url}/containers/{made}", timeout=60).status_code == 200
        assert becomes_true(lambda: not sandboxes.claims(), 60)
        assert time.monotonic() - began < 60
        sandboxes.kubectl.wait(f"pod/{first.strip()}", "delete")


def test_the_claim_of_an_expired_container_is_gone(sandboxes: ClusterSandboxes, tmp_path: Path) -> None:
    sandboxes.wait_until_full()
    with sandboxes.run_gateway(tmp_path) as gateway:
        expiry = {"anchor": "last_active_at", "minutes": 1}
        body = {"name": "brief", "expires_after": expiry}
        made = httpx.post(f"{gateway.url}/containers", json=body, timeout=60).json()["id"]
        assert logs_of(ask(gateway.url, _POD_NAME, container=made))
        assert len(sandboxes.claims()) == 1
        assert becomes_true(lambda: not sandboxes.claims(), 60 + 60)
        listed = httpx.get(f"{gateway.url}/containers/{made}", timeout=60)
        assert listed.status_code == 404 or listed.json()["status"] == "expired"


def test_the_model_is_told_when_no_pod_becomes_ready_in_time(
    sandboxes: ClusterSandboxes, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The pool is empty and a quota keeps the cold pod from being made (003, user story 3)."""
    kubectl, timeout = sandboxes.kubectl, 6
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none"},
        "spec": {"hard": {"pods": "0"}},
    }

    def restore() -> None:
        kubectl.delete("resourcequota/none")
        sandboxes.scale(_REPLICAS)
        sandboxes.wait_until_full()

    request.addfinalizer(restore)
    sandboxes.scale(0)
    assert becomes_true(lambda: not kubectl.names("pods"), 60)
    kubectl.apply(quota)
    kubectl.wait("resourcequota/none", "jsonpath={.status.hard.pods}=0")
    with ScriptedModelServer() as model:
        models = [{"match": "*", "base_url": model.url}]
        with sandboxes.run_gateway(tmp_path, models, isolation="execution", claim_timeout=timeout) as gateway:
            model.script(code_call("print('never')"), text_answer("It did not run."))
            began = time.monotonic()
            response = ask(gateway.url, "")
            took = time.monotonic() - began
            told = model.requests[-1].body.decode()
            assert becomes_true(lambda: not sandboxes.claims(), 10)
    assert len(model.requests) == 2
    assert "no sandbox was ready within 6 s" in told
    assert timeout - 1 < took < timeout + 1
    assert response["status"] == "completed"
    assert kubectl.names("pods") == set()


@pytest.mark.parametrize("isolation", ["execution", "container"])
def test_claims_of_a_killed_gateway_are_gone_after_the_sweep(
    sandboxes: ClusterSandboxes, tmp_path: Path, isolation: str
) -> None:
    sandboxes.wait_until_full()
    with sandboxes.run_gateway(tmp_path, isolation=isolation) as gateway:
        threads = [threading.Thread(target=_ask_in_vain, args=(gateway.url,)) for _ in range(_REPLICAS)]
        for thread in threads:
            thread.start()
        assert becomes_true(lambda: len(sandboxes.claims()) == _REPLICAS, 60)
        gateway.kill()
        for thread in threads:
            thread.join()
    assert len(sandboxes.claims()) == _REPLICAS
    with sandboxes.run_gateway(tmp_path, isolation=isolation) as gateway:
        if isolation == "execution":  # nobody can ever use these sandboxes again
            assert becomes_true(lambda: not sandboxes.claims(), 60)
        else:  # the containers live on, and their sandboxes end with them
            listed = httpx.get(f"{gateway.url}/containers", timeout=60).json()["data"]
            assert len(listed) == _REPLICAS
            for container in listed:
                httpx.delete(f"{gateway.url}/containers/{container['id']}", timeout=60).raise_for_status()
            assert becomes_true(lambda: not sandboxes.claims(), 60)


def _ask_in_vain(url: str) -> None:
    with pytest.raises(httpx.TransportError):
        ask(url, "import time\nprint('started', flush=True)\ntime.sleep(600)")
