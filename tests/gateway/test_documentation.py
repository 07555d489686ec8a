"""docs/gateway.md names every endpoint and every figure; imports `fumehood.gateway`."""

import re
from pathlib import Path
from typing import Any

from fumehood.gateway.app import Gateway
from fumehood.gateway.metrics import Metrics

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "gateway.md").read_text(encoding="utf-8")


def test_every_endpoint_is_on_the_page_and_no_other() -> None:
    nothing: Any = None
    gateway = Gateway(runs=nothing, store=nothing, models=nothing, containers=nothing, files=nothing)
    routes = {f"{method} {path.replace(':path', '')}" for method, path in gateway.routes}
    section = PAGE.partition("## Endpoints")[2].partition("\n## ")[0]
    assert set(re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", section)) == routes


def test_every_figure_is_on_the_page_and_no_other() -> None:
    names = {
        f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in Metrics().collect()
    }
    section = PAGE.partition("## Figures")[2]
    assert set(re.findall(r"`(fumehood_\w+)", section)) == names
