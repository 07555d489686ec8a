"""What Fumehood relies on of agent-sandbox, with the real controller and a small image of its own."""

import datetime as dt
import urllib.request

import pytest

from tests.support.kubectl import Kubectl, KubectlError, claim, condition_of, template, warm_pool
from tools.kubernetes_cluster.layout import ANSWER_IMAGE

_POOL = "answers"
_REPLICAS = 2


@pytest.fixture(scope="module")
def pool(kubectl: Kubectl) -> str:
    container = {
        "name": "answer",
        "image": ANSWER_IMAGE,
        "readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1},
    }
    pod = {"containers": [container], "terminationGracePeriodSeconds": 1}
    kubectl.apply(template(_POOL, pod), warm_pool(_POOL, _POOL, _REPLICAS))
    _wait_until_full(kubectl)
    return _POOL


def _wait_until_full(kubectl: Kubectl) -> None:
    kubectl.wait(f"sandboxwarmpool/{_POOL}", f"jsonpath={{.status.readyReplicas}}={_REPLICAS}")


def _read(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}:8080/", timeout=10) as response:
        return response.read().decode().strip()


def test_a_claim_takes_a_warm_pod_and_its_deletion_ends_the_pod(kubectl: Kubectl, pool: str) -> None:
    warm = kubectl.names("pods")
    kubectl.apply(claim("one", pool))
    kubectl.wait("sandboxclaim/one", "condition=Ready")
    sandbox = kubectl.get("sandboxclaim", "one")["status"]["sandbox"]
    assert sandbox["name"] in warm  # the pod is named like the Sandbox, and had been started before
    assert _read(sandbox["podIPs"][0]) == sandbox["name"]
    _wait_until_full(kubectl)  # without the one that was taken
    assert len(kubectl.names("pods")) == _REPLICAS + 1
    kubectl.delete("sandboxclaim/one")
    kubectl.wait(f"pod/{sandbox['name']}", "delete")
    assert len(kubectl.names("pods")) == _REPLICAS
    assert sandbox["name"] not in kubectl.names("sandboxes")


def test_each_claim_has_a_pod_of_its_own_also_when_the_pool_is_empty(kubectl: Kubectl, pool: str) -> None:
    names = [f"many-{number}" for number in range(_REPLICAS + 3)]
    kubectl.apply(*(claim(name, pool) for name in names))
    for name in names:
        kubectl.wait(f"sandboxclaim/{name}", "condition=Ready")
    sandboxes = [kubectl.get("sandboxclaim", name)["status"]["sandbox"] for name in names]
    assert len({each["name"] for each in sandboxes}) == len(names)
    assert {_read(each["podIPs"][0]) for each in sandboxes} == {each["name"] for each in sandboxes}
    for name in names:
        kubectl.delete(f"sandboxclaim/{name}")
    for each in sandboxes:
        kubectl.wait(f"pod/{each['name']}", "delete")
    _wait_until_full(kubectl)


def test_a_claim_is_deleted_with_its_pod_when_its_time_is_over(kubectl: Kubectl, pool: str) -> None:
    end = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=10)
    kubectl.apply(claim("short", pool, shutdownTime=end.strftime("%Y-%m-%dT%H:%M:%SZ")))
    kubectl.wait("sandboxclaim/short", "condition=Ready")
    pod = kubectl.get("sandboxclaim", "short")["status"]["sandbox"]["name"]
    kubectl.wait("sandboxclaim/short", "delete")
    kubectl.wait(f"pod/{pod}", "delete")
    assert dt.datetime.now(dt.UTC) >= end - dt.timedelta(seconds=1)  # the time had whole seconds


def test_a_claim_of_a_pool_that_is_missing_says_so(kubectl: Kubectl) -> None:
    kubectl.apply(claim("lost", "no-such-pool"))
    kubectl.wait("sandboxclaim/lost", "condition=Ready=False")
    assert condition_of(kubectl.get("sandboxclaim", "lost"), "Ready")["reason"] == "WarmPoolNotFound"
    kubectl.delete("sandboxclaim/lost")


def test_a_claim_without_a_pool_is_refused(kubectl: Kubectl) -> None:
    tree = claim("wrong", "x")
    del tree["spec"]["warmPoolRef"]
    with pytest.raises(KubectlError, match="warmPoolRef"):
        kubectl.apply(tree)
