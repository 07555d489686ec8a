"""The adapter for the Responses API: validates prompts and settings, and builds requests."""

import os
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from fumehood.client.adapters.evaluation_arguments import EvaluationArguments
from fumehood.client.adapters.evaluation_stream import AsyncEvaluationStream, EvaluationStream
from fumehood.client.adapters.openai.code_interpreter_tool import (
    build_container_spec,
    find_stated_memory_limit,
)
from fumehood.client.adapters.openai.compaction import CompactionManager
from fumehood.client.adapters.openai.config import (
    MODELS_WITHOUT_REASONING,
    CompactionConfig,
    OpenAIClientConfig,
    OpenAIHostedToolsConfig,
    OpenAIModelConfig,
)
from fumehood.client.adapters.openai.container_errors import ContainerGoneError, build_container_error
from fumehood.client.adapters.openai.native_tools.native_tool_section import (
    check_native_tools,
    merge_native_tool_lists,
)
from fumehood.client.adapters.openai.responses_client import (
    ResponsesClient,
    detect_gateway,
    fetch_announced_tools,
)
from fumehood.client.adapters.openai.sdk_clients import SdkClients
from fumehood.client.adapters.openai.tool_call_loop import ToolCallLoop
from fumehood.client.adapters.openai.wire import EXECUTION_FIELD, responses_tool_choice, responses_tool_spec
from fumehood.client.adapters.openai.workspace import OpenAIContainerWorkspaceSection
from fumehood.client.adapters.provider_adapter import PromptResponse
from fumehood.client.adapters.tool_execution import ToolExecutor, tool_to_spec
from fumehood.client.budget import Budget, BudgetTracker
from fumehood.client.dbc import require
from fumehood.client.deadlines import Deadline
from fumehood.client.errors import PromptValidationError
from fumehood.client.filesystem import Filesystem
from fumehood.client.prompt._types import SupportsDataclass
from fumehood.client.prompt.prompt import Prompt, RenderedPrompt, ToolChoice, merge_native_tools
from fumehood.client.prompt.tool import (
    ProviderTool,
    ToolContext,
    is_async_function,
    select_provider_tools,
)
from fumehood.client.resources import ResourceRegistry, Resources
from fumehood.client.runtime.blocking_shell import BlockingShell
from fumehood.client.runtime.evaluation_lock import hold_conversation
from fumehood.client.runtime.evaluation_observer import NOOP_OBSERVER, EvaluationObserver, EvaluationStarted
from fumehood.client.runtime.events import EventBus, FanOutEventBus
from fumehood.client.runtime.operations import CallFunction, Steps, perform
from fumehood.client.runtime.session import SessionProtocol
from fumehood.client.throttle import ThrottlePolicy
from fumehood.client.type_validation import check_arguments
from fumehood.client.workspace_section import WorkspaceSection

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

Out = TypeVar("Out")

# The vector stores for prompts that name none.
VECTOR_STORES_VARIABLE = "OPENAI_VECTOR_STORE_IDS"

_INCLUDE_BY_TOOL = {
    "code_interpreter": "code_interpreter_call.outputs",
    "file_search": "file_search_call.results",
    "web_search": "web_search_call.action.sources",
}


class OpenAIAdapter:
    """Evaluates prompts with the Responses API: functions run here, hosted tools at the provider.

    It keeps nothing between evaluations but its client; a conversation is kept in the session, and only with
    `compaction`.
    """

    provider = "openai"

    @check_arguments
    def __init__(
        self,
        *,
        model: str,
        model_config: OpenAIModelConfig | None = None,
        client_config: OpenAIClientConfig | None = None,
        client: "OpenAI | None" = None,
        async_client: "AsyncOpenAI | None" = None,
        hosted_tools: OpenAIHostedToolsConfig | None = None,
        compaction: CompactionConfig | None = None,
        tool_choice: ToolChoice = "auto",
        openai_native_tools: Mapping[str, Collection[str]] | None = None,
        strict: bool = False,
        throttle: ThrottlePolicy | None = None,
        max_turns: int = 100,
        observer: EvaluationObserver | None = None,
    ) -> None:
        """client: a client of the SDK for `evaluate` and `stream`; by default one is created from `client_config` on
        first use. async_client: the same for `aevaluate` and `astream`.

        openai_native_tools: native tools of models that are not known here. strict: an unknown model has none.
        max_turns: limit of model requests per evaluation. observer: observes every evaluation, such as
        `fumehood.telemetry.ClientTelemetry`.
        """
        require(
            model.strip(),
            f"model is {model!r}; it has to be a name.",
        )
        require(max_turns > 0, f"max_turns is {max_turns}; it has to be positive.")
        self.model = model
        self._model_config = model_config or OpenAIModelConfig()
        self._clients = SdkClients(client_config, client, async_client)
        self._hosted_tools = hosted_tools or OpenAIHostedToolsConfig()
        self._compaction = compaction
        self._tool_choice: ToolChoice = tool_choice
        self._native_tools = merge_native_tool_lists(openai_native_tools)
        self._strict = strict
        self._throttle = throttle
        self._max_turns = max_turns
        self._observer = observer or NOOP_OBSERVER

    @property
    def client(self) -> "OpenAI":
        return self._clients.get_client()

    @property
    def async_client(self) -> "AsyncOpenAI":
        """The client for the running event loop."""
        return self._clients.get_async_client()

    def close(self) -> None:
        """Close the blocking client, if it was created here."""
        self._clients.close()

    async def aclose(self) -> None:
        """Close both clients, if they were created here: the blocking one, and that of the running event loop."""
        await self._clients.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def evaluate(
        self,
        prompt: Prompt[Out],
        *params: SupportsDataclass,
        session: SessionProtocol | None = None,
        bus: EventBus | None = None,
        parse_output: bool = True,
        deadline: Deadline | None = None,
        budget: Budget | None = None,
        budget_tracker: BudgetTracker | None = None,
        resources: Resources | None = None,
    ) -> PromptResponse[Out]:
        """Return the model's answer to a prompt, after running the tools that it called.

        params: bound for this evaluation. bus: gets all events in addition to the session's own. parse_output: False
        leaves the answer as text. budget_tracker: shares a budget between evaluations (`budget` is for one alone).

        Raises PromptEvaluationError; PromptValidationError before anything is sent.
        """
        call = EvaluationArguments(
            prompt, params, session, bus, parse_output, deadline, budget, budget_tracker, resources
        )
        return BlockingShell(self._clients.get_client).run(self._evaluate(call))

    async def aevaluate(
        self,
        prompt: Prompt[Out],
        *params: SupportsDataclass,
        session: SessionProtocol | None = None,
        bus: EventBus | None = None,
        parse_output: bool = True,
        deadline: Deadline | None = None,
        budget: Budget | None = None,
        budget_tracker: BudgetTracker | None = None,
        resources: Resources | None = None,
    ) -> PromptResponse[Out]:
        """As `evaluate`, without blocking the event loop: asynchronous handlers are awaited, others run in threads."""
        from fumehood.client.runtime.async_shell import AsyncShell

        call = EvaluationArguments(
            prompt, params, session, bus, parse_output, deadline, budget, budget_tracker, resources
        )
        return await AsyncShell(self._clients.get_async_client).run(self._evaluate(call, is_async=True))

    def stream(
        self,
        prompt: Prompt[Out],
        *params: SupportsDataclass,
        session: SessionProtocol | None = None,
        bus: EventBus | None = None,
        parse_output: bool = True,
        deadline: Deadline | None = None,
        budget: Budget | None = None,
        budget_tracker: BudgetTracker | None = None,
        resources: Resources | None = None,
    ) -> EvaluationStream[Out]:
        """As `evaluate`, with events while the model writes and tools run: `with adapter.stream(…) as events: …`."""
        call = EvaluationArguments(
            prompt, params, session, bus, parse_output, deadline, budget, budget_tracker, resources
        )
        shell = BlockingShell(self._clients.get_client)
        return EvaluationStream(self._evaluate(call, is_streamed=True), shell)

    def astream(
        self,
        prompt: Prompt[Out],
        *params: SupportsDataclass,
        session: SessionProtocol | None = None,
        bus: EventBus | None = None,
        parse_output: bool = True,
        deadline: Deadline | None = None,
        budget: Budget | None = None,
        budget_tracker: BudgetTracker | None = None,
        resources: Resources | None = None,
    ) -> AsyncEvaluationStream[Out]:
        """As `stream`, without blocking the event loop: `async with adapter.astream(…) as events: …`."""
        from fumehood.client.runtime.async_shell import AsyncShell

        call = EvaluationArguments(
            prompt, params, session, bus, parse_output, deadline, budget, budget_tracker, resources
        )
        shell = AsyncShell(self._clients.get_async_client)
        return AsyncEvaluationStream(self._evaluate(call, is_async=True, is_streamed=True), shell)

    # ---- one evaluation -------------------------------------------------------------------------------------

    def _evaluate(
        self, call: EvaluationArguments[Out], *, is_async: bool = False, is_streamed: bool = False
    ) -> Steps[PromptResponse[Out]]:
        """Evaluate a prompt; all four ways to do so run these steps."""
        event = EvaluationStarted(
            prompt_name=call.prompt.name,
            adapter=self.provider,
            model=self.model,
            session_id=call.session.session_id,
        )
        with self._observer.observe_evaluation(event):
            try:
                bound = call.prompt.bind(*call.params)
                rendered = bound.render(session=call.session)
                workspace = _find_workspace(rendered)
                request = self._build_request(rendered, workspace)
                if not is_async:
                    _check_handlers_block(rendered)
            except PromptValidationError as error:
                error.prompt_name = error.prompt_name or call.prompt.name
                raise
            if call.deadline is not None:
                call.deadline.check("the first request", prompt_name=bound.name)
            connection = self.async_client if is_async else self.client
            api = ResponsesClient(connection, self._throttle, self._observer)
            steps = self._run_evaluation(call, bound, rendered, workspace, request, api, is_streamed)
            if self._compaction is not None:
                steps = hold_conversation(call.session, steps, deadline=call.deadline, prompt_name=bound.name)
            return (yield from steps)

    def _run_evaluation(
        self,
        call: EvaluationArguments[Out],
        bound: Prompt[Out],
        rendered: RenderedPrompt[Out],
        workspace: OpenAIContainerWorkspaceSection | None,
        request: dict[str, Any],
        api: ResponsesClient,
        is_streamed: bool,
    ) -> Steps[PromptResponse[Out]]:
        yield from self._check_announced_tools(request, api, bound.name, call.deadline)
        yield from self._set_container(request, rendered, workspace, api, call.deadline)
        if workspace is not None and (workspace.filesystem.archive or workspace.filesystem.relocated_files):
            rendered = bound.render(session=call.session)  # the text may have changed with the container
        request["include"] = yield from self._build_include(request, api, call.deadline)
        manager = None
        if self._compaction is not None:
            manager = CompactionManager(api.client, self._compaction, call.session, model=self.model, api=api)
        sources = bound.resources if call.resources is None else (*bound.resources, call.resources)
        with ResourceRegistry.combine(sources) as registry:
            context = ToolContext(
                prompt=bound,
                rendered_prompt=rendered,
                adapter=self,
                session=call.session,
                event_bus=FanOutEventBus(call.session.bus, call.bus, self._observer),
                resources=registry,
                deadline=call.deadline,
                budget_tracker=call.tracker,
                filesystem=_find_filesystem(rendered, registry),
            )
            loop = ToolCallLoop(
                api=api,
                rendered=rendered,
                context=context,
                request=request,
                executor=ToolExecutor(context, bound.template.policies, self._observer),
                manager=manager,
                recreate_container=None
                if workspace is None
                else partial(_recreate_container, workspace, bound, context),
                memory_limit=find_stated_memory_limit(rendered.native_tools)
                if workspace is None
                else workspace.container_config.memory_limit,
                parse_output=call.parse_output,
                max_turns=self._max_turns,
                is_streamed=is_streamed,
            )
            return (yield from loop.run())

    # ---- the request ----------------------------------------------------------------------------------------

    def _build_request(
        self, rendered: RenderedPrompt[Any], workspace: OpenAIContainerWorkspaceSection | None
    ) -> dict[str, Any]:
        """Build the request without input, container and include. Raises PromptValidationError."""
        name = rendered.prompt_name
        names_by_type: dict[str, str] = {}
        for tool in select_provider_tools(rendered.tools):
            require(
                tool.provider == self.provider,
                f"The tool {tool.name!r} is {tool.provider}'s; this adapter is {self.provider}'s.",
                prompt_name=name,
            )
            other = names_by_type.setdefault(tool.native_type, tool.name)
            require(
                other == tool.name,
                f"The tools {other!r} and {tool.name!r} are both {tool.native_type}; only one can get its results.",
                prompt_name=name,
            )
        native = self._collect_native_tools(rendered, workspace)
        functions = [tool_to_spec(tool) for tool in rendered.tools if not isinstance(tool, ProviderTool)]
        tools = [responses_tool_spec(spec, prompt_name=name) for spec in (*functions, *native)]
        chosen = self._tool_choice if rendered.tool_choice is None else rendered.tool_choice
        require(
            chosen != "none" or not rendered.native_tools,
            "The prompt asks for native tools, and tool_choice 'none' forbids them.",
            prompt_name=name,
        )
        choice = responses_tool_choice(chosen, tools, prompt_name=name)
        request: dict[str, Any] = {"model": self.model, **self._model_config.build_request_fields()}
        if tools:
            request["tools"] = tools
        if choice is not None:
            request["tool_choice"] = choice
        if rendered.output is not None:
            schema = rendered.output.schema
            form = {
                "type": "json_schema",
                "name": rendered.output.name,
                "schema": schema.body,
                "strict": schema.strict,
            }
            request["text"] = {"format": form}
        if self._compaction is not None and self._compaction.zdr_mode:
            request["store"] = False
        return request

    def _collect_native_tools(
        self, rendered: RenderedPrompt[Any], workspace: OpenAIContainerWorkspaceSection | None
    ) -> list[Mapping[str, object]]:
        """Return the native tools of prompt and adapter, validated."""
        name = rendered.prompt_name
        requested = [*rendered.native_tools, *self._hosted_tools.envelopes()]
        found = {str(tool.get("name")): tool for tool in merge_native_tools(requested, prompt_name=name)}
        check_native_tools(self.model, found, self._native_tools, strict=self._strict, prompt_name=name)
        if search := found.get("file_search"):
            stores = (
                search.get("vector_store_ids")
                or os.environ.get(VECTOR_STORES_VARIABLE, "").replace(",", " ").split()
            )
            require(
                stores,
                f"file_search has no vector_store_ids: name a store to search in, or set {VECTOR_STORES_VARIABLE}.",
                prompt_name=name,
            )
            found["file_search"] = {**search, "vector_store_ids": stores}
        interpreter = found.get("code_interpreter")
        if interpreter is not None and "container" in interpreter:
            container = build_container_spec(interpreter["container"])
            found["code_interpreter"] = {**interpreter, "container": container}
        if workspace is not None:
            require(
                interpreter is not None,
                "A container workspace needs the code interpreter: pass hosted_tools="
                "OpenAIHostedToolsConfig(code_interpreter=True).",
                prompt_name=name,
            )
            workspace.check_tool_container(found["code_interpreter"].get("container"))
        return [*found.values()]

    def _set_container(
        self,
        request: dict[str, Any],
        rendered: RenderedPrompt[Any],
        workspace: OpenAIContainerWorkspaceSection | None,
        api: ResponsesClient,
        deadline: Deadline | None,
    ) -> Steps[None]:
        """Set the container of every code interpreter; an explicitly named one must be alive."""
        for tool in request.get("tools", ()):
            if tool["type"] != "code_interpreter":
                continue
            if workspace is not None:
                workspace.bind_client(
                    self.client, create_client=self._clients.recreate, policy=self._throttle
                )
                fill = partial(workspace.ensure_container, tool.get("container"), deadline=deadline)
                tool["container"] = yield from perform(CallFunction(fill))
                continue
            container = tool.setdefault("container", {"type": "auto"})
            if isinstance(container, str):
                yield from _check_container_alive(container, api, rendered.prompt_name, deadline)

    def _check_announced_tools(
        self, request: Mapping[str, Any], api: ResponsesClient, prompt_name: str, deadline: Deadline | None
    ) -> Steps[None]:
        """Raise PromptValidationError if a gateway does not host a native tool for the model: it would not offer it."""
        native = [tool["type"] for tool in request.get("tools", ()) if tool["type"] != "function"]
        if not native:
            return
        announced = yield from fetch_announced_tools(api.client, self.model, deadline=deadline)
        if announced is None or "*" in announced:
            return
        for kind in native:
            require(
                kind in announced,
                f"The gateway does not host the native tool {kind!r} for the model {self.model!r} (it hosts: "
                f"{', '.join(sorted(announced)) or 'none'}); leave the tool out, or choose another model.",
                prompt_name=prompt_name,
            )

    def _build_include(
        self, request: Mapping[str, Any], api: ResponsesClient, deadline: Deadline | None
    ) -> Steps[list[str]]:
        kinds = [tool["type"] for tool in request.get("tools", ())]
        fields = [_INCLUDE_BY_TOOL[kind] for kind in kinds if kind in _INCLUDE_BY_TOOL]
        if "code_interpreter" in kinds and (yield from detect_gateway(api.client, deadline=deadline)):
            fields.append(EXECUTION_FIELD)
        if request.get("store") is False and not self.model.startswith(MODELS_WITHOUT_REASONING):
            fields.append("reasoning.encrypted_content")
        return fields


def _find_workspace(rendered: RenderedPrompt[Any]) -> OpenAIContainerWorkspaceSection | None:
    workspaces = [section for section in rendered.sections if isinstance(section, WorkspaceSection)]
    require(
        not any(section.is_closed for section in workspaces),
        "The prompt's workspace was cleaned up, and its files are gone; make another one.",
        prompt_name=rendered.prompt_name,
    )
    found = [section for section in workspaces if isinstance(section, OpenAIContainerWorkspaceSection)]
    require(len(found) < 2, "A prompt can have one container workspace.", prompt_name=rendered.prompt_name)
    return found[0] if found else None


def _recreate_container(
    workspace: OpenAIContainerWorkspaceSection, prompt: Prompt[Any], context: ToolContext, expired_id: str
) -> Steps[tuple[str, str]]:
    """Replace an expired container; return the new id and the prompt's new text."""
    renew = partial(workspace.filesystem.renew_container, expired_id, deadline=context.deadline)
    made = yield from perform(CallFunction(renew))
    return made, prompt.render(session=context.session).text


def _check_container_alive(
    container_id: str, api: ResponsesClient, prompt_name: str, deadline: Deadline | None
) -> Steps[None]:
    try:
        status = yield from api.container_status(container_id, prompt_name=prompt_name, deadline=deadline)
    except ContainerGoneError as error:
        raise build_container_error(container_id, error) from error
    if status in ("expired", "deleted"):
        raise build_container_error(container_id, ContainerGoneError(status, is_expired=status == "expired"))


def _find_filesystem(rendered: RenderedPrompt[Any], resources: ResourceRegistry) -> Filesystem | None:
    """Return the filesystem of the first section that has one, else the one among the resources."""
    for section in rendered.sections:
        if isinstance(found := getattr(section, "filesystem", None), Filesystem):
            return found
    return resources.get(Filesystem) if Filesystem in resources else None


def _check_handlers_block(rendered: RenderedPrompt[Any]) -> None:
    """Raise PromptValidationError if a handler would have to be awaited."""
    for tool in rendered.tools:
        handlers = (tool.handler, getattr(tool, "handle_provider_output", None))
        require(
            not any(is_async_function(handler) for handler in handlers),
            f"The handler of the tool {tool.name!r} is asynchronous; use aevaluate or astream, or make it a function "
            "that blocks.",
            prompt_name=rendered.prompt_name,
        )
