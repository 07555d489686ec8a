"""docs/sandbox-protocol.md says what the server does: routes, codes, fields, limits."""

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from fumehood.protocol.sandbox import sandbox_errors, sandbox_messages
from fumehood.sandbox_server.api.app import SandboxServerApp
from fumehood.sandbox_server.api.http_operations import OPERATIONS
from fumehood.sandbox_server.api.openapi import build_document
from fumehood.sandbox_server.api.sandbox_http_exchange import RequestTimeout, SandboxMethodNotAllowed
from fumehood.sandbox_server.settings import SandboxServerSettings

TEXT = (Path(__file__).parent.parent / "docs" / "sandbox-protocol.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return re.split(r"^## ", TEXT.partition(f"\n## {title}\n")[2], flags=re.MULTILINE)[0]


def test_every_route_is_documented_and_every_documented_route_is_there() -> None:
    documented = set(re.findall(r"^\| `([A-Z]+) (/[^` ]*)`", section("Calls"), re.MULTILINE))
    assert documented == {(operation.method, operation.path) for operation in OPERATIONS}


def test_every_operation_has_a_handler_and_is_in_the_description() -> None:
    paths = build_document(SandboxServerSettings(), protected=True)["paths"]
    for operation in OPERATIONS:
        assert callable(getattr(SandboxServerApp, operation.handler))
        described = paths[operation.path][operation.method.lower()]
        assert {str(status) for status in operation.responses} <= set(described["responses"])
        assert "400" in described["responses"]
        assert ("401" in described["responses"]) == operation.protected
        named = {parameter["name"] for parameter in described["parameters"] if parameter["in"] == "path"}
        assert named == set(re.findall(r"\{(\w+)\}", operation.path))


def test_every_query_parameter_is_documented() -> None:
    calls = section("Calls")
    for operation in OPERATIONS:
        (line,) = [
            line for line in calls.splitlines() if line.startswith(f"| `{operation.method} {operation.path}`")
        ]
        for parameter in operation.parameters:
            if parameter.location == "query":
                assert re.search(rf"[?&]{parameter.name}=", line), (operation.path, parameter.name)


def _kinds(kind: type[sandbox_errors.SandboxError]) -> list[type[sandbox_errors.SandboxError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _kinds(child))]


def test_every_error_code_is_documented_with_its_status() -> None:
    documented = {
        (int(status), code)
        for status, codes in re.findall(r"^\| (\d{3}) \| ([^|]*) \|", section("Errors"), re.MULTILINE)
        for code in re.findall(r"`(\w+)`", codes)
    }
    wire = {
        kind for kind in _kinds(sandbox_errors.SandboxError) if kind.__module__ == sandbox_errors.__name__
    }
    assert documented == {
        (kind.status, kind.code) for kind in wire | {SandboxMethodNotAllowed, RequestTimeout}
    }


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("Sandboxes", sandbox_messages.SandboxSpec),
        ("Sandboxes", sandbox_messages.SandboxInfo),
        ("Executions", sandbox_messages.ExecuteRequest),
        ("Executions", sandbox_messages.ExecutionEnd),
        ("Executions", sandbox_messages.ExceptionRaised),
        ("Files", sandbox_messages.FileEntry),
        ("Files", sandbox_messages.FileListing),
        ("Files", sandbox_messages.UnpackSummary),
        ("Files", sandbox_messages.WriteFilesSummary),
        ("Files", sandbox_messages.ReadFilesRequest),
        ("One shot", sandbox_messages.OneShotRequest),
        ("One shot", sandbox_messages.OneShotResponse),
        ("Health and shutdown", sandbox_messages.ServerHealth),
    ],
)
def test_every_field_is_documented(title: str, kind: Any) -> None:
    text = section(title)
    assert [
        field.encode_name for field in msgspec.structs.fields(kind) if f"`{field.encode_name}`" not in text
    ] == []


def test_every_event_and_status_is_documented() -> None:
    text = section("Executions")
    events = [str(kind.__struct_config__.tag) for kind in get_args(sandbox_messages.ExecutionEvent.__value__)]
    assert len(events) == 7
    for name in [*events, *get_args(sandbox_messages.ExecutionEndStatus.__value__)]:
        assert re.search(rf"^\| [^|]*`{name}`", text, re.MULTILINE), name


def test_the_limits_are_those_of_the_settings() -> None:
    units = {"": 1, " MiB": 1 << 20, " GiB": 1 << 30, " s": 1, " h": 3600}
    settings = SandboxServerSettings()
    seen = 0
    for limits, names in re.findall(r"^\| [^|]* \| ([^|]*) \| ([^|]*) \|$", section("Limits"), re.MULTILINE):
        numbers = [
            int(number) * units[unit] for number, unit in re.findall(r"(\d+)( MiB| GiB| s| h|)", limits)
        ]
        values = [getattr(settings, name) for name in re.findall(r"`(\w+)`", names)]
        if values:
            assert [value for value in values if value is not None] == numbers, names
            seen += 1
    assert seen == 10


def test_version_and_names_are_those_of_the_types() -> None:
    assert f"fumehood-sandbox-protocol: {sandbox_messages.PROTOCOL_VERSION}`" in TEXT
    for tier in sandbox_messages.MEMORY_TIERS:
        assert f"`{tier}`" in TEXT
