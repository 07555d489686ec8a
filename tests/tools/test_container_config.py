"""`container` in every shape that clients send."""

import sys
from typing import Any

import msgspec
import pytest
from inline_snapshot import snapshot

from fumehood.containers.container_settings import ContainerSettings
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.container_objects import ContainerSpec
from fumehood.protocol.sandbox.sandbox_messages import DomainSecret, NetworkAllowlist
from fumehood.tools.container_config import ContainerChoice, echo_code_interpreter, read_container_choice
from fumehood.tools.interpreter_call import CodeInterpreterToolSettings
from tests.support.interpreter_harness import make_tool_spec, run_scripted

SECRET = "s3cret-value"
POLICY = {
    "type": "allowlist",
    "allowed_domains": ["api.example.com"],
    "domain_secrets": [{"domain": "api.example.com", "name": "TOKEN", "value": SECRET}],
}


@pytest.mark.parametrize(
    ("container", "choice"),
    [
        (None, ContainerChoice(None, ContainerSpec())),
        ({"type": "auto"}, ContainerChoice(None, ContainerSpec())),
        ({"type": "auto", "memory_limit": None, "file_ids": None}, ContainerChoice(None, ContainerSpec())),
        ({"type": "auto", "file_ids": [], "new": {"x": 1}}, ContainerChoice(None, ContainerSpec())),
        (
            {"type": "auto", "file_ids": ["file-1", "file-2", "file-1"]},
            ContainerChoice(None, ContainerSpec(file_ids=("file-1", "file-2"))),
        ),
        ({"type": "auto", "memory_limit": "16g"}, ContainerChoice(None, ContainerSpec(memory="16g"))),
        ({"type": "auto", "network_policy": {"type": "disabled"}}, ContainerChoice(None, ContainerSpec())),
        ("cntr_1", ContainerChoice("cntr_1", ContainerSpec())),
        ({"id": "cntr_1"}, ContainerChoice("cntr_1", ContainerSpec())),
        ({"id": "cntr_1", "memory_limit": "4g"}, ContainerChoice("cntr_1", ContainerSpec(memory="4g"))),
    ],
)
def test_what_is_understood(container: object, choice: ContainerChoice) -> None:
    assert read_container_choice(make_tool_spec(container)) == choice
    assert read_container_choice(make_tool_spec(container, allowed_callers=["direct"], later=True)) == choice


@pytest.mark.parametrize(
    ("container", "words"),
    [
        (5, "container"),
        ([], "container"),
        ({}, "container must be an id, or an object whose type is 'auto'"),
        ({"type": "manual"}, "container.type"),
        (
            {"type": "auto", "memory_limit": "8g"},
            "container.memory_limit must be one of '1g', '4g', '16g', '64g'",
        ),
        ({"type": "auto", "memory_limit": "1G"}, "container.memory_limit"),
        ({"type": "auto", "memory_limit": 1}, "container.memory_limit"),
        ({"id": "cntr_1", "memory_limit": "2g"}, "container.memory_limit"),
        ({"type": "auto", "file_ids": [1]}, "container.file_ids"),
        ({"type": "auto", "file_ids": "file-1"}, "container.file_ids"),
        ({"type": "auto", "network_policy": "all"}, "network_policy"),
        ({"type": "auto", "network_policy": {"type": "open"}}, "container.network_policy"),
        ({"type": "auto", "network_policy": {}}, "container.network_policy"),
        ({"type": "auto", "network_policy": {"type": "allowlist"}}, "container.network_policy"),
    ],
)
def test_what_is_refused(container: object, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_container_choice(make_tool_spec(container))
    assert words in refused.value.message
    assert (refused.value.status, refused.value.param) == (400, "tools")
    assert SECRET not in refused.value.message


def test_a_network_policy() -> None:
    network = read_container_choice(
        make_tool_spec({"type": "auto", "network_policy": {**POLICY, "new": 1}})
    ).spec.network
    assert network == NetworkAllowlist(
        allowed_domains=["api.example.com"],
        domain_secrets=[DomainSecret(domain="api.example.com", name="TOKEN", value=SECRET)],
    )


async def test_what_no_container_may_have_is_refused_before_anything_begins() -> None:
    async with run_scripted() as interpreter:
        with pytest.raises(InvalidRequest) as refused:
            await interpreter.tool.configure(
                make_tool_spec({"type": "auto", "network_policy": POLICY}),
                interpreter.make_context().caller,
                [],
            )
        assert (refused.value.message, refused.value.param) == snapshot(
            ("container.network_policy: this server allows containers no network.", "tools")
        )


@pytest.mark.parametrize(
    ("container", "shown"),
    [
        (None, {"type": "auto"}),
        ("cntr_1", "cntr_1"),
        ({"id": "cntr_1", "memory_limit": "4g"}, "cntr_1"),
        ({"type": "auto", "memory_limit": "4g"}, {"type": "auto", "memory_limit": "4g"}),
        ({"type": "auto", "file_ids": []}, {"type": "auto", "file_ids": []}),
        (
            {"type": "auto", "network_policy": POLICY},
            {"type": "auto", "network_policy": {"type": "allowlist", "allowed_domains": ["api.example.com"]}},
        ),
    ],
)
def test_what_the_response_shows(container: object, shown: object) -> None:
    echo: dict[str, Any] = msgspec.json.decode(
        echo_code_interpreter(make_tool_spec(container, allowed_callers=["direct"]))
    )
    assert echo == {"type": "code_interpreter", "container": shown, "allowed_callers": ["direct"]}


async def test_what_the_model_is_told() -> None:
    async with run_scripted() as interpreter:
        offered = await interpreter.tool.configure(make_tool_spec(), interpreter.make_context().caller, [])
        assert offered.function.name == "code_interpreter"
        lines = offered.function.description.splitlines()
        assert lines[0].startswith(
            f"Runs Python {sys.version_info.major}.{sys.version_info.minor} in an isolated"
        )
        assert lines[1] == "- Variables, imports and files are kept from call to call."
        assert lines[2].startswith("- The working directory is /mnt/data.")
        assert lines[2].endswith("link them in your answer as [name](sandbox:/mnt/data/name).")
        assert lines[3].startswith("- Installed: numpy, pandas,")
        assert lines[3].endswith("name other packages in `requirements`.")
        assert lines[4:] == ["- There is no network.", "- Code may run for 60 seconds."]
        assert msgspec.json.decode(offered.function.parameters) == snapshot(
            {
                "type": "object",
                "properties": {
                    "code": {"type": "string", "description": "The Python code to run."},
                    "requirements": {
                        "type": "array",
                        "items": {"type": "string"},
                        "description": 'Packages to install first, e.g. ["humanize", "polars>=1.0"].',
                    },
                },
                "required": ["code"],
                "additionalProperties": False,
            }
        )


async def test_what_the_model_is_told_of_other_settings() -> None:
    settings = CodeInterpreterToolSettings(
        execution_timeout=2.5,
        keeps_variables=False,
        python="3.14",
        libraries=("numpy",),
    )
    containers = ContainerSettings(allowed_domains=frozenset({"*"}))
    async with run_scripted(settings=settings, containers=containers) as interpreter:
        policy = {"type": "auto", "network_policy": POLICY}
        offered = await interpreter.tool.configure(
            make_tool_spec(policy), interpreter.make_context().caller, []
        )
        lines = offered.function.description.splitlines()
        assert lines[0].startswith("Runs Python 3.14 ")
        assert lines[1] == "- Files are kept from call to call; variables and imports are not."
        assert lines[3] == "- Installed: numpy and more; name other packages in `requirements`."
        assert lines[4:] == [
            "- There is no network but HTTP and HTTPS to api.example.com.",
            "- Code may run for 2.5 seconds.",
        ]
        assert SECRET not in offered.function.description
