"""Prompts, tools and items for tests of the client's adapter."""

from dataclasses import dataclass
from typing import Any

from fumehood.client import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    Section,
    Session,
    ThrottlePolicy,
    Tool,
    ToolContext,
    ToolInvoked,
    ToolResult,
)
from fumehood.client.adapters.openai import OpenAIHostedToolsConfig
from fumehood.client.errors import DeadlineExceededError
from fumehood.client.prompt import AnyTool

PATIENT = ThrottlePolicy(base_delay=0.001, max_delay=0.002)
HOSTED = OpenAIHostedToolsConfig(code_interpreter=True)


@dataclass(frozen=True)
class Query:
    sql: str


@dataclass(frozen=True)
class Answer:
    value: int


def run(params: Query, *, context: ToolContext) -> ToolResult[Query]:
    if params.sql == "nothing":
        return None  # pyright: ignore[reportReturnType] - that is the mistake
    if params.sql == "nested":
        context.session[Answer].append(Answer(2))
        raise DeadlineExceededError("the inner prompt was late", phase="deadline")
    if params.sql == "raise":
        context.session[Answer].append(Answer(1))
        raise RuntimeError("the database is down")
    return ToolResult.ok(params)


query_tool = Tool[Query, Query](name="run_query", description="Run it.", handler=run)


def prompt(*tools: AnyTool, sections: tuple[Section[Any], ...] = (), **more: Any) -> Prompt[None]:
    task = MarkdownSection(title="Task", key="task", template="Do it.", tools=tools)
    return Prompt(ns="tests", key="task", sections=(*sections, task), **more)


def typed(**more: Any) -> Prompt[Answer]:
    return Prompt(PromptTemplate[Answer](ns="tests", key="typed"), **more)


def function_call(call_id: str, arguments: str, name: str = "run_query") -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{call_id}",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def code_call(**more: Any) -> dict[str, Any]:
    outputs = [{"type": "logs", "logs": "2\n"}]
    base = {"type": "code_interpreter_call", "id": "ci_1", "code": "1+1", "container_id": "cntr_1"}
    return {**base, "status": "completed", "outputs": outputs, **more}


def listen() -> tuple[Session, list[ToolInvoked]]:
    session, heard = Session(), list[ToolInvoked]()
    session.bus.subscribe(ToolInvoked, heard.append)
    return session, heard
