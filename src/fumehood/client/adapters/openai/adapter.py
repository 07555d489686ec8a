"""The adapter for the Responses API: validates prompts and settings, and builds requests."""

import os
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

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
    check_client,
)
from fumehood.client.adapters.openai.container_errors import ContainerGoneError, build_container_error
from fumehood.client.adapters.openai.evaluation import Evaluation
from fumehood.client.adapters.openai.native_tools.native_tool_section import (
    check_native_tools,
    merge_native_tool_lists,
)
from fumehood.client.adapters.openai.responses_client import (
    ResponsesClient,
    fetch_announced_tools,
    is_fumehood_gateway,
)
from fumehood.client.adapters.openai.wire import EXECUTION_FIELD, responses_tool_choice, responses_tool_spec
from fumehood.client.adapters.openai.workspace import OpenAIContainerWorkspaceSection
from fumehood.client.adapters.provider_adapter import PromptResponse
from fumehood.client.adapters.shared import ToolExecutor, tool_to_spec
from fumehood.client.budget import Budget, BudgetTracker
from fumehood.client.dbc import require
from fumehood.client.deadlines import Deadline
from fumehood.client.errors import PromptValidationError
from fumehood.client.filesystem import Filesystem
from fumehood.client.prompt._types import SupportsDataclass
from fumehood.client.prompt.prompt import Prompt, RenderedPrompt, ToolChoice, merge_native_tools
from fumehood.client.prompt.tool import ProviderTool, ToolContext, select_provider_tools
from fumehood.client.resources import ResourceRegistry, Resources
from fumehood.client.runtime.evaluation_observer import NOOP_OBSERVER, EvaluationObserver, EvaluationStarted
from fumehood.client.runtime.events import EventBus, FanOutEventBus
from fumehood.client.runtime.session import Session, SessionProtocol
from fumehood.client.throttle import ThrottlePolicy
from fumehood.client.type_validation import check_arguments, require_type, shorten_repr
from fumehood.client.workspace_section import WorkspaceSection

if TYPE_CHECKING:
    from openai import OpenAI

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
        hosted_tools: OpenAIHostedToolsConfig | None = None,
        compaction: CompactionConfig | None = None,
        tool_choice: ToolChoice = "auto",
        openai_native_tools: Mapping[str, Collection[str]] | None = None,
        strict: bool = False,
        throttle: ThrottlePolicy | None = None,
        max_turns: int = 100,
        observer: EvaluationObserver | None = None,
    ) -> None:
        """client: a client of the SDK; by default one is created from `client_config` on first use.

        openai_native_tools: native tools of models that are not known here. strict: an unknown model has none.
        max_turns: limit of model requests per evaluation. observer: observes every evaluation, such as
        `fumehood.telemetry.ClientTelemetry`.
        """
        require(model.strip(), f"model is {model!r}; it has to be a name.")
        if client is not None:
            check_client(client)
        require(
            client is None or client_config is None, "client and client_config exclude each other; give one."
        )
        require(max_turns > 0, f"max_turns is {max_turns}; it has to be positive.")
        self.model = model
        self._model_config = model_config or OpenAIModelConfig()
        self._client_config = client_config or OpenAIClientConfig()
        self._client = client
        self._owns_client = client is None
        self._client_lock = threading.Lock()
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
        with self._client_lock:
            if self._client is None:
                self._client = self._client_config.create_client()
            return self._client

    def close(self) -> None:
        """Close the client, if it was created here."""
        if self._client is not None and self._owns_client:
            self._client.close()
            self._client = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        require(
            isinstance(cast(object, prompt), Prompt),
            f"{shorten_repr(prompt)} is no prompt; of a template, make Prompt(template).",
        )
        require(
            isinstance(cast(object, deadline), Deadline | None),
            f"deadline is {shorten_repr(deadline)}; in five seconds is Deadline.after(5).",
        )
        require(
            isinstance(cast(object, budget), Budget | None),
            f"budget is {shorten_repr(budget)}; so many tokens in all are Budget(max_total_tokens=…).",
        )
        require_type(session, SessionProtocol | None, "session")
        require_type(bus, EventBus | None, "bus")
        require_type(budget_tracker, BudgetTracker | None, "budget_tracker")
        require_type(resources, Resources | None, "resources")
        require_type(parse_output, bool, "parse_output")
        require(
            budget is None or budget_tracker is None,
            "budget and budget_tracker exclude each other; give one.",
        )
        session = Session() if session is None else session
        event = EvaluationStarted(
            prompt_name=prompt.name, adapter=self.provider, model=self.model, session_id=session.session_id
        )
        with self._observer.observe_evaluation(event):
            tracker = budget_tracker or (BudgetTracker(budget) if budget else None)
            return self._evaluate(prompt, params, session, bus, parse_output, deadline, tracker, resources)

    def _evaluate(
        self,
        prompt: Prompt[Out],
        params: Sequence[SupportsDataclass],
        session: SessionProtocol,
        bus: EventBus | None,
        parse_output: bool,
        deadline: Deadline | None,
        tracker: BudgetTracker | None,
        resources: Resources | None,
    ) -> PromptResponse[Out]:
        deadline = _earliest_deadline(deadline, tracker.budget.deadline if tracker else None)
        try:
            bound = prompt.bind(*params)
            rendered = bound.render(session=session)
            workspace = _find_workspace(rendered)
            request = self._build_request(rendered, workspace)
        except PromptValidationError as error:
            error.prompt_name = error.prompt_name or prompt.name
            raise
        if deadline is not None:
            deadline.check("the first request", prompt_name=bound.name)
        self._check_announced_tools(request, bound.name, deadline)
        api = ResponsesClient(self.client, self._throttle, self._observer)
        self._set_container(request, rendered, workspace, api, deadline)
        if workspace is not None and (workspace.filesystem.archive or workspace.filesystem.relocated_files):
            rendered = bound.render(session=session)  # the text may have changed with the container
        request["include"] = self._build_include(request, deadline)
        manager = None
        if self._compaction is not None:
            manager = CompactionManager(self.client, self._compaction, session, model=self.model, api=api)
        sources = bound.resources if resources is None else (*bound.resources, resources)
        with ResourceRegistry.combine(sources) as registry:
            context = ToolContext(
                prompt=bound,
                rendered_prompt=rendered,
                adapter=self,
                session=session,
                event_bus=FanOutEventBus(session.bus, bus, self._observer),
                resources=registry,
                deadline=deadline,
                budget_tracker=tracker,
                filesystem=_find_filesystem(rendered, registry),
            )
            return Evaluation(
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
                parse_output=parse_output,
                max_turns=self._max_turns,
            ).run()

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
    ) -> None:
        """Set the container of every code interpreter; an explicitly named one must be alive."""
        for tool in request.get("tools", ()):
            if tool["type"] != "code_interpreter":
                continue
            if workspace is not None:
                again = self._client_config.create_client if self._owns_client else None
                workspace.bind_client(self.client, create_client=again, policy=self._throttle)
                tool["container"] = workspace.ensure_container(tool.get("container"), deadline=deadline)
                continue
            container = tool.setdefault("container", {"type": "auto"})
            if isinstance(container, str):
                _check_container_alive(container, api, rendered.prompt_name, deadline)

    def _check_announced_tools(
        self, request: Mapping[str, Any], prompt_name: str, deadline: Deadline | None
    ) -> None:
        """Raise PromptValidationError if a gateway does not host a native tool for the model: it would not offer it."""
        native = [tool["type"] for tool in request.get("tools", ()) if tool["type"] != "function"]
        announced = fetch_announced_tools(self.client, self.model, deadline=deadline) if native else None
        if announced is None or "*" in announced:
            return
        for kind in native:
            require(
                kind in announced,
                f"The gateway does not host the native tool {kind!r} for the model {self.model!r} (it hosts: "
                f"{', '.join(sorted(announced)) or 'none'}); leave the tool out, or choose another model.",
                prompt_name=prompt_name,
            )

    def _build_include(self, request: Mapping[str, Any], deadline: Deadline | None) -> list[str]:
        kinds = [tool["type"] for tool in request.get("tools", ())]
        fields = [_INCLUDE_BY_TOOL[kind] for kind in kinds if kind in _INCLUDE_BY_TOOL]
        if "code_interpreter" in kinds and is_fumehood_gateway(self.client, deadline=deadline):
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
) -> tuple[str, str]:
    """Replace an expired container; return the new id and the prompt's new text."""
    made = workspace.filesystem.renew_container(expired_id, deadline=context.deadline)
    return made, prompt.render(session=context.session).text


def _check_container_alive(
    container_id: str, api: ResponsesClient, prompt_name: str, deadline: Deadline | None
) -> None:
    try:
        status = api.container_status(container_id, prompt_name=prompt_name, deadline=deadline)
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


def _earliest_deadline(*deadlines: Deadline | None) -> Deadline | None:
    return min((one for one in deadlines if one is not None), key=lambda one: one.expires_at, default=None)
