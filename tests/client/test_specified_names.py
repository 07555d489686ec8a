"""Modules, signatures, defaults and errors as specification 004 has them."""

import dataclasses
import importlib
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import pytest

from fumehood.client import CompactionError, ContainerExpiredError, HostMount, WinkError
from fumehood.client.adapters import openai
from fumehood.client.adapters.openai import (
    CompactionConfig,
    CompactionManager,
    CompactionState,
    ContainerConfig,
    ContainerFilesystem,
    FileSearchConfig,
    OpenAIAdapter,
    OpenAIContainerWorkspaceSection,
    OpenAIHostedToolsConfig,
)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("adapter", ["OpenAIAdapter"]),
        ("config", ["OpenAIHostedToolsConfig", "CompactionConfig"]),
        ("workspace", ["OpenAIContainerWorkspaceSection"]),
        ("container", ["ContainerManager"]),
        ("container_fs", ["ContainerFilesystem"]),
        ("compaction", ["CompactionManager", "CompactionState"]),
    ],
)
def test_modules_have_the_names_of_the_specification(module: str, names: list[str]) -> None:
    found = importlib.import_module(f"{openai.__name__}.{module}")
    for name in names:
        assert name in openai.__all__
        assert getattr(openai, name) is getattr(found, name)


@pytest.mark.parametrize(
    ("settings", "defaults"),
    [
        (OpenAIHostedToolsConfig(), {"code_interpreter": False, "file_search": None, "web_search": False}),
        (ContainerConfig(), {"memory_limit": "4g", "mode": "explicit"}),
        (CompactionConfig(), {"enabled": True, "threshold_tokens": 100_000, "zdr_mode": False}),
        (FileSearchConfig(), {"vector_store_ids": (), "max_results": 20}),
        (
            HostMount("/repos/project"),
            {
                "host_path": "/repos/project",
                "mount_path": None,
                "include_glob": (),
                "exclude_glob": (),
                "max_bytes": None,
                "follow_symlinks": False,
            },
        ),
        (CompactionState(), {"encrypted_items": (), "last_compaction_tokens": 0, "compaction_count": 0}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_settings_have_the_defaults_of_the_specification(settings: Any, defaults: dict[str, object]) -> None:
    assert dataclasses.asdict(settings) == defaults
    for name in defaults:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(settings, name, None)


@pytest.mark.parametrize(
    ("function", "defaults"),
    [
        (
            OpenAIContainerWorkspaceSection,
            {
                "session": Parameter.empty,
                "mounts": (),
                "allowed_host_roots": (),
                "container_config": None,
                "sync_on_cleanup": False,
                "accepts_overrides": False,
            },
        ),
        (
            ContainerFilesystem,
            {
                "client": Parameter.empty,
                "container_config": Parameter.empty,
                "tarball_path": None,
                "local_root": None,
            },
        ),
        (CompactionManager, dict.fromkeys(("client", "config", "session"), Parameter.empty)),
        (
            OpenAIAdapter,
            {
                "model": Parameter.empty,
                **dict.fromkeys(("model_config", "client_config", "client", "hosted_tools", "compaction")),
                "tool_choice": "auto",
            },
        ),
        (
            OpenAIAdapter.evaluate,
            {
                "prompt": Parameter.empty,
                **dict.fromkeys(("session", "deadline", "budget", "budget_tracker", "resources")),
            },
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_signatures_are_those_of_the_specification(
    function: Callable[..., object], defaults: dict[str, object]
) -> None:
    """Whatever else there is, is optional; so is the session of an evaluation."""
    parameters = signature(function).parameters
    assert {name: parameters[name].default for name in defaults} == defaults
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    required = {
        one.name for one in parameters.values() if one.kind in named and one.default is Parameter.empty
    }
    assert required <= {*defaults, "self"}


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (ContainerExpiredError("cntr_1", ValueError("x")), {"container_id": "cntr_1"}),
        (CompactionError(7, ValueError("x")), {"token_count": 7}),
    ],
)
def test_errors_have_the_base_of_the_specification(error: Any, fields: dict[str, object]) -> None:
    assert issubclass(type(error), WinkError)
    assert {name: getattr(error, name) for name in fields} == fields
    assert isinstance(error.original_error, ValueError)
