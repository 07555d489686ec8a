"""The figures of a gateway with a real sandbox server, and all that is written of them."""

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import INTERPRETER, RunningGateway
from tests.support.gateway_process import code_call, text_answer
from tests.support.prometheus_page import MetricsPage
from tests.support.sandbox_runs import has_cgroups
from tools import build_dashboard

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
NOT_OURS = {"job", "instance", "le", "up"}
GREEDY = "import mmap\nm = mmap.mmap(-1, 2 << 30)\nfor i in range(0, 2 << 30, 4096): m[i] = 1"


def fetch_page(gateway: RunningGateway) -> bytes:
    with urllib.request.urlopen(gateway.process.url.removesuffix("/v1") + "/metrics", timeout=60) as answer:
        return answer.read()


def scrape_metrics(gateway: RunningGateway) -> MetricsPage:
    return MetricsPage.parse(fetch_page(gateway).decode())


def run(gateway: RunningGateway, code: str) -> None:
    gateway.model.script(code_call(code), text_answer("done"))
    gateway.client.responses.create(model="scripted-too", input="?", tools=[INTERPRETER])


@pytest.fixture(scope="module")
def before_and_after(gateway: RunningGateway) -> tuple[MetricsPage, MetricsPage]:
    """Of code that ends well, raises, takes its sandbox with it, and wants more memory than it has."""
    before = scrape_metrics(gateway)
    for code in ("print(6 * 7)", "1/0", "import os; os._exit(0)", *([GREEDY] if has_cgroups() else [])):
        run(gateway, code)
    return before, scrape_metrics(gateway)


@pytest.fixture(scope="module")
def exported(before_and_after: tuple[MetricsPage, MetricsPage]) -> MetricsPage:
    return before_and_after[1]


# --- what is counted ----------------------------------------------------------------------------------


def test_what_code_did_is_seen_in_the_gateway_and_in_its_sandbox_server(
    before_and_after: tuple[MetricsPage, MetricsPage],
) -> None:
    before, after = before_and_after
    greedy = int(has_cgroups())

    def grown(sample: str, **labels: str) -> float:
        return after.value(sample, **labels) - before.value(sample, **labels)

    ends = ("ok", "error", "lost", "out_of_memory", "timeout", "abandoned")
    assert [grown("fumehood_container_calls_total", end=end) for end in ends] == [1, 1, 1, greedy, 0, 0]
    for status, state in (("ok", "kept"), ("error", "kept"), ("lost", "lost")):
        assert grown("fumehood_sandbox_executions_total", status=status, state=state) == 1
    assert grown("fumehood_sandbox_executions_total", status="out_of_memory", state="lost") == greedy
    turns = 2 * (3 + greedy)
    assert grown("fumehood_model_turns_total", model="scripted*", outcome="ended") == turns
    assert grown("fumehood_model_turn_first_event_seconds_count", model="scripted*") == turns
    assert grown("fumehood_containers_started_total") == 3 + greedy
    assert grown("fumehood_container_phase_duration_seconds_count", phase="run") == 3 + greedy
    assert grown("fumehood_container_phase_duration_seconds_count", phase="acquire") == 3 + greedy
    assert grown("fumehood_container_phase_duration_seconds_count", phase="files") > 0
    started = sum(grown("fumehood_container_sandbox_starts_total", start=start) for start in ("warm", "cold"))
    assert started == sum(grown("fumehood_sandbox_starts_total", kind=kind) for kind in ("warm", "cold"))
    assert (
        grown("fumehood_store_write_duration_seconds_count") == grown("fumehood_store_batch_size_count") > 0
    )
    assert after.value("fumehood_event_loop_lag_seconds_count") > 0
    assert after.value("fumehood_disk_size_bytes", volume="blobs") > after.value(
        "fumehood_disk_free_bytes", volume="blobs"
    )
    assert after.value("fumehood_local_sandbox_server_up") == 1


def test_no_label_holds_what_a_caller_wrote(exported: MetricsPage) -> None:
    assert not [
        labels for _, labels in exported.samples if any("scripted-too" in value for _, value in labels)
    ]


# --- what is written of it ----------------------------------------------------------------------------


def test_the_page_tells_of_every_figure_and_of_no_other(exported: MetricsPage) -> None:
    rows: list[tuple[str, str, str]] = re.findall(
        r"^\| `(\w+)(?:\{([\w, ]+)\})?` \| (\w+) \|", PAGE, re.MULTILINE
    )
    told = {name: kind for name, _, kind in rows}
    assert len(told) == len(rows)
    unbounded = {"fumehood_sandbox_memory_bytes": "gauge"} if not has_cgroups() else {}
    assert told == {**exported.kinds, **unbounded}
    for name, labels, kind in rows:
        sample = f"{name}_count" if kind == "histogram" else name
        if name not in unbounded:
            assert exported.labels(sample) == set(re.findall(r"\w+", labels)), name


def expressions() -> Iterator[str]:
    for panel in json.loads(build_dashboard.FILE.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


def test_dashboard_and_rules_ask_for_what_is_there(exported: MetricsPage) -> None:
    asked: set[str] = set()
    for expression in expressions():
        names = re.findall(r"(?<![\w:])fumehood_\w+", expression)
        asked.update(names)
        known = NOT_OURS.union(*(exported.labels(name) for name in names))
        matched = re.findall(r"(\w+)\s*[=!]~?\s*\"", expression)
        grouped = [label for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(", ")]
        assert known.issuperset(matched + grouped), expression
    shown = {re.sub(r"_bucket$", "", name) for name in asked}
    assert shown == set(exported.kinds), "a figure that nobody looks at, or that is not there"


def test_what_rules_record_is_what_alerts_ask_for() -> None:
    recorded = {
        rule["record"]
        for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
        if "record" in rule
    }
    asked = {name for expression in expressions() for name in re.findall(r"fumehood:[\w:]+", expression)}
    assert asked <= recorded


def test_every_alert_says_what_to_do_in_a_section_that_is_there() -> None:
    sections = {
        re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-"): text
        for title, text in re.findall(r"^### (.+)\n((?:(?!#).*\n?)*)", PAGE, re.MULTILINE)
    }
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    for alert in alerts:
        page, _, anchor = alert["annotations"].pop("runbook").partition("#")
        assert page == "docs/metrics.md"
        assert f"`{alert['alert']}`" in sections[anchor]
        assert set(alert["annotations"]) == {"summary", "description"}
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert "for" in alert or re.search(r"increase\(", alert["expr"]), "it would ring at once"
    told = {name for text in sections.values() for name in re.findall(r"`(Fumehood\w+)`", text)}
    assert told == {alert["alert"] for alert in alerts}


def test_the_dashboard_is_what_grafana_wants() -> None:
    text = build_dashboard.FILE.read_text(encoding="utf-8")
    assert text == build_dashboard.text(), "run python -m tools.build_dashboard"
    board = json.loads(text)
    assert board["schemaVersion"] >= 36
    assert (board["uid"], board["title"]) == ("fumehood", "Fumehood")
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
        for target in panel.get("targets", ()):
            assert (
                target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            )
        references = [target["refId"] for target in panel.get("targets", ())]
        assert len(references) == len(set(references))


# --- what Prometheus says of it -----------------------------------------------------------------------


def promtool(*arguments: str | Path, given: bytes = b"") -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run([program, *map(str, arguments)], input=given, capture_output=True)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


@pytest.mark.slow
def test_prometheus_takes_the_page(gateway: RunningGateway) -> None:
    promtool("check", "metrics", given=fetch_page(gateway))


@pytest.mark.slow
def test_prometheus_takes_the_configuration_and_every_alert_rings_for_its_reason() -> None:
    promtool("check", "config", RULES.with_name("scrape.yaml"))
    promtool("test", "rules", RULES.with_name("rules.test.yaml"))


@pytest.mark.slow
def test_prometheus_can_read_what_the_dashboard_asks(tmp_path: Path) -> None:
    written = [expression.replace("$__rate_interval", "1m") for expression in expressions()]
    rules = [{"record": f"asked:{number}", "expr": text} for number, text in enumerate(written)]
    file = tmp_path / "asked.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": rules}]}), encoding="utf-8")
    promtool("check", "rules", file)
