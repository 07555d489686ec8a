"""Generates deploy/grafana/fumehood.json from the panels below.

Run `python -m tools.build_dashboard` after a change; a test compares the committed file.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "fumehood.json"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3
_QUANTILES = (0.5, 0.95, 0.99)
_MINE = 'instance=~"$instance"'
_BADLY = 'status=~"out_of_memory|timeout|lost|install_failed"'


@dataclass(frozen=True)
class Panel:
    """One graph: `queries` are pairs of an expression and a legend."""

    title: str
    about: str
    unit: str
    queries: Sequence[tuple[str, str]]


def rate(metric: str, *by: str, where: str = "") -> str:
    """The rate of a counter per second."""
    return _sum(f"rate({_chosen(metric, where)}[$__rate_interval])", by)


def last_hour(metric: str, *by: str, where: str = "") -> str:
    """The increase of a counter in the last hour."""
    return _sum(f"increase({_chosen(metric, where)}[1h])", by)


def gauge(metric: str, *by: str) -> str:
    return _sum(_chosen(metric), by)


def _chosen(metric: str, where: str = "") -> str:
    return f"{metric}{{{_MINE},{where}}}" if where else f"{metric}{{{_MINE}}}"


def _sum(expression: str, by: Sequence[str]) -> str:
    return f"sum by ({', '.join(by)}) ({expression})" if by else f"sum({expression})"


def quantiles(
    metric: str, *by: str, where: str = "", of: Sequence[float] = _QUANTILES
) -> list[tuple[str, str]]:
    """Quantiles of a histogram."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    inner = rate(f"{metric}_bucket", *by, "le", where=where)
    return [(f"histogram_quantile({q}, {inner})", f"{legend} p{q * 100:g}".strip()) for q in of]


ROWS: dict[str, list[Panel]] = {
    "Requests": [
        Panel(
            "Requests",
            "Requests by route.",
            "reqps",
            [(rate("fumehood_requests_total", "route"), "{{route}}")],
        ),
        Panel(
            "Errors",
            "Unsuccessful responses. 5xx: errors of the gateway or model servers; 0: the client disconnected.",
            "reqps",
            [(rate("fumehood_requests_total", "status", where='status=~"0|4..|5.."'), "{{status}}")],
        ),
        Panel(
            "Request duration",
            "To the end of the response, without WebSockets.",
            "s",
            quantiles("fumehood_request_duration_seconds", where='route!~".*websocket.*"'),
        ),
        Panel(
            "Streams",
            "Responses being streamed, and open WebSockets.",
            "short",
            [(gauge("fumehood_open_streams"), "streams"), (gauge("fumehood_open_websockets"), "WebSockets")],
        ),
        Panel(
            "Rejections",
            "By limits and authentication, and clients dropped because they read too slowly.",
            "reqps",
            [
                (rate("fumehood_limit_rejections_total", "limit"), "limit {{limit}}"),
                (rate("fumehood_auth_rejections_total", "reason"), "authentication: {{reason}}"),
                (rate("fumehood_dropped_readers_total", "reason"), "reader {{reason}}"),
            ],
        ),
        Panel(
            "Responses",
            "Finished responses by status, and compactions.",
            "ops",
            [
                (rate("fumehood_responses_total", "status"), "{{status}}"),
                (rate("fumehood_compactions_total", "kind"), "compaction, {{kind}}"),
            ],
        ),
    ],
    "Models": [
        Panel(
            "Model turns",
            "By outcome, and running turns.",
            "ops",
            [
                (rate("fumehood_model_turns_total", "model", "outcome"), "{{model}} {{outcome}}"),
                (gauge("fumehood_model_turns_running", "model"), "{{model}} running"),
            ],
        ),
        Panel(
            "Time to first event",
            "Of a model turn, including retries.",
            "s",
            quantiles("fumehood_model_turn_first_event_seconds", "model", of=(0.5, 0.95)),
        ),
        Panel(
            "Model turn duration",
            "Including retries.",
            "s",
            quantiles("fumehood_model_turn_duration_seconds", "model", of=(0.5, 0.95)),
        ),
        Panel(
            "Tokens",
            "Input and output tokens of models.",
            "short",
            [(rate("fumehood_tokens_total", "direction"), "{{direction}}/s")],
        ),
        Panel(
            "Events",
            "Sent to clients.",
            "short",
            [(rate("fumehood_stream_events_total"), "events/s")],
        ),
        Panel(
            "Model server errors",
            "By kind, also if a retry succeeded.",
            "ops",
            [
                (rate("fumehood_model_errors_total", "model", "kind"), "{{model}} {{kind}}"),
                (rate("fumehood_model_turn_retries_total", "model"), "{{model}} retries"),
            ],
        ),
    ],
    "Tools and containers": [
        Panel(
            "Tool calls",
            "In finished responses.",
            "ops",
            [(rate("fumehood_tool_calls_total", "type", "status"), "{{type}} {{status}}")],
        ),
        Panel(
            "Code calls",
            "Finished calls in containers by status.",
            "ops",
            [
                (rate("fumehood_container_calls_total", "end"), "{{end}}"),
                (gauge("fumehood_container_calls_running"), "running"),
            ],
        ),
        Panel(
            "Phases of code calls",
            "Acquire a sandbox, run the code, transfer files.",
            "s",
            quantiles("fumehood_container_phase_duration_seconds", "phase", of=(0.5, 0.95)),
        ),
        Panel(
            "Containers", "Running containers.", "short", [(gauge("fumehood_live_containers"), "containers")]
        ),
        Panel(
            "Container lifecycle",
            "Created, ended, rejected and purged.",
            "ops",
            [
                (rate("fumehood_containers_started_total"), "created"),
                (rate("fumehood_containers_ended_total", "end"), "{{end}}"),
                (rate("fumehood_containers_rejected_total"), "rejected"),
                (rate("fumehood_containers_purged_total"), "purged"),
            ],
        ),
        Panel(
            "Sandboxes acquired",
            "By containers, warm or cold.",
            "ops",
            [(rate("fumehood_container_sandbox_starts_total", "start"), "{{start}}")],
        ),
    ],
    "Pods": [
        Panel(
            "Claims",
            "Claims for sandboxes in pods: open, and those that wait for a pod.",
            "short",
            [(gauge("fumehood_claims_open"), "open"), (gauge("fumehood_claims_in_flight"), "in flight")],
        ),
        Panel(
            "Time until a pod is ready",
            "Warm from the pool, or cold.",
            "s",
            quantiles("fumehood_claim_duration_seconds", "start", of=(0.5, 0.95)),
        ),
        Panel(
            "Claims that fail",
            "By reason; breaks of the watch, and sandboxes that no container referred to.",
            "ops",
            [
                (rate("fumehood_claim_failures_total", "reason"), "{{reason}}"),
                (rate("fumehood_claim_watch_failures_total"), "watch"),
                (rate("fumehood_container_orphans_destroyed_total"), "orphans destroyed"),
            ],
        ),
    ],
    "Sandboxes": [
        Panel(
            "Sandboxes",
            "Existing sandboxes, pool, capacity and pending creations.",
            "short",
            [
                (gauge("fumehood_sandbox_instances"), "sandboxes"),
                (gauge("fumehood_sandbox_pool_available"), "in the pool"),
                (gauge("fumehood_sandbox_pool_size"), "pool size"),
                (gauge("fumehood_sandbox_capacity"), "capacity"),
                (gauge("fumehood_sandbox_pending_creations"), "pending creations"),
                (gauge("fumehood_sandbox_running_executions"), "running executions"),
            ],
        ),
        Panel(
            "Warm and cold starts",
            "Many cold starts: the pool is too small.",
            "ops",
            [(rate("fumehood_sandbox_starts_total", "kind"), "{{kind}}")],
        ),
        Panel(
            "Sandbox creation",
            "Warm, cold and package installs.",
            "s",
            quantiles(
                "fumehood_sandbox_phase_duration_seconds",
                "phase",
                where='phase=~"create_.*|install"',
                of=(0.5, 0.95),
            ),
        ),
        Panel(
            "Executions",
            "By status; the state is lost if the sandbox died or was killed.",
            "ops",
            [(rate("fumehood_sandbox_executions_total", "status", "state"), "{{status}}, state {{state}}")],
        ),
        Panel(
            "Out of memory, timeouts, losses",
            "In the last hour.",
            "short",
            [
                (last_hour("fumehood_sandbox_executions_total", "status", where=_BADLY), "{{status}}"),
                (last_hour("fumehood_sandbox_unexpected_exits_total"), "unexpected exits"),
            ],
        ),
        Panel(
            "Execution duration",
            "Of the code, and to its first output.",
            "s",
            quantiles(
                "fumehood_sandbox_phase_duration_seconds",
                "phase",
                where='phase=~"execute|first_output"',
                of=(0.5, 0.95),
            ),
        ),
        Panel(
            "Pool and zygotes",
            "Refills and failures.",
            "ops",
            [
                (rate("fumehood_sandbox_pool_refills_total"), "refills"),
                (rate("fumehood_sandbox_pool_refill_failures_total"), "failures"),
                (rate("fumehood_sandbox_zygote_restarts_total"), "zygote restarts"),
                (rate("fumehood_sandbox_errors_total", "code"), "error: {{code}}"),
            ],
        ),
        Panel(
            "Memory of sandboxes",
            "Including zygotes.",
            "bytes",
            [(gauge("fumehood_sandbox_memory_bytes", "instance"), "{{instance}}")],
        ),
        Panel(
            "Network and packages",
            "Network requests of code, and package installs.",
            "ops",
            [
                (rate("fumehood_sandbox_egress_requests_total", "verdict"), "request {{verdict}}"),
                (rate("fumehood_sandbox_package_installs_total", "outcome"), "package {{outcome}}"),
            ],
        ),
    ],
    "Files, disk and process": [
        Panel(
            "Files",
            "Uploads and downloads, and transfers of sandboxes.",
            "Bps",
            [
                (rate("fumehood_file_bytes_total", "direction"), "gateway {{direction}}"),
                (rate("fumehood_sandbox_file_transfer_bytes_total", "direction"), "sandboxes {{direction}}"),
            ],
        ),
        Panel("Uploads", "Uploaded files.", "ops", [(rate("fumehood_uploads_total"), "uploads")]),
        Panel(
            "Free disk space",
            "Of the database and the blobs.",
            "percentunit",
            [
                (
                    f"{_chosen('fumehood_disk_free_bytes')} / {_chosen('fumehood_disk_size_bytes')}",
                    "{{instance}} {{volume}}",
                )
            ],
        ),
        Panel(
            "Database transactions",
            "Including the sync to disk.",
            "s",
            quantiles("fumehood_store_write_duration_seconds"),
        ),
        Panel(
            "Writes per transaction",
            "Grows with load.",
            "short",
            quantiles("fumehood_store_batch_size", of=(0.5, 0.95)),
        ),
        Panel(
            "Event loop",
            "Lag, and whether the sandbox server answers (1).",
            "s",
            [
                *quantiles("fumehood_event_loop_lag_seconds", "instance", of=(0.5, 0.99)),
                (_chosen("fumehood_local_sandbox_server_up"), "{{instance}} sandbox server up"),
            ],
        ),
    ],
}


def dashboard() -> dict[str, object]:
    panels: list[dict[str, object]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"h": 1, "w": 24, "x": 0, "y": top},
                "panels": [],
            }
        )
        top += 1
        for number, panel in enumerate(row):
            column, line = number % _COLUMNS, number // _COLUMNS
            panels.append(_graph(panel, len(panels) + 1, column * _WIDTH, top + line * _HEIGHT))
        top += -(-len(row) // _COLUMNS) * _HEIGHT
    return {
        "title": "Fumehood",
        "uid": "fumehood",
        "description": "docs/metrics.md explains the metrics.",
        "tags": ["fumehood"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "annotations": {"list": []},
        "templating": {"list": [_datasource(), _instances()]},
        "panels": panels,
    }


def _graph(panel: Panel, number: int, x: int, y: int) -> dict[str, object]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": expr, "legendFormat": legend}
            for index, (expr, legend) in enumerate(panel.queries)
        ],
    }


def _datasource() -> dict[str, object]:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
    }


def _instances() -> dict[str, object]:
    """Gateways, and sandbox servers that are scraped by themselves."""
    query = 'label_values({__name__=~"fumehood_open_streams|fumehood_sandbox_instances"}, instance)'
    return {
        "name": "instance",
        "label": "Instance",
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "instances"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


def text() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
