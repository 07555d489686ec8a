"""docs/gateway.md names every endpoint."""

import re
from pathlib import Path
from typing import Any

from fumehood.gateway.app import Gateway

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "gateway.md").read_text(encoding="utf-8")


def test_every_endpoint_is_on_the_page_and_no_other() -> None:
    nothing: Any = None
    gateway = Gateway(
        runs=nothing, store=nothing, models=nothing, passthrough=nothing, containers=nothing, files=nothing
    )
    routes = {f"{method} {path.replace(':path', '')}" for method, path in gateway.routes}
    section = PAGE.partition("## Endpoints")[2].partition("\n## ")[0]
    assert set(re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", section)) == routes
