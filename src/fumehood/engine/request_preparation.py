"""Validates a request and loads everything that its run needs.

Requests are rejected here, with an ApiError that names the parameter: once the stream has begun, it is too late for an
HTTP status.
"""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET, Raw

from fumehood.cpu_worker import run_in_worker
from fumehood.engine.attachment_resolver import AttachmentResolver, ResolvedInput
from fumehood.engine.compactor import Compactor, ConversationWindow
from fumehood.engine.conversation_loader import ConversationLoader, check_size, reserve_if_large
from fumehood.engine.request_tools import NO_TOOLS, RequestTools, decode_function, read_tools
from fumehood.engine.turn_output_assembler import Toolbox
from fumehood.interfaces import Caller, Clock, ConfiguredTool, HostedTool, ModelProvider, ReserveMemory
from fumehood.protocol.attachments import Attachment
from fumehood.protocol.conversation import ConversationSegment, conversation_size, last_compaction_index
from fumehood.protocol.model_turns import GenerationParameters, ModelRequest
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.response_projection import (
    INCLUDE_ENCRYPTED_REASONING,
    INCLUDE_EXECUTION,
    INCLUDE_LOGPROBS,
)
from fumehood.protocol.openai.responses import (
    ContextCompactionConfig,
    CreateResponse,
    ReasoningConfig,
    Response,
    TextConfig,
    TextFormat,
)
from fumehood.protocol.openai.tool_redaction import redact_tool
from fumehood.protocol.openai.tool_specs import (
    ToolChoice,
    ToolSpec,
    parse_tool_choice,
)

_NO_CHOICE = ToolChoice()
_SERVICE_TIERS = frozenset({"default", "flex", "scale", "priority", "fast", "ultrafast"})


class PreparedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the loop needs, validated.

    wants_contents: whether the client asked for the contents of files that hosted tools produce.
    wants_encrypted_reasoning: whether the client asked for reasoning that it can carry.
    generate: False if the input is only stored, to be continued later, and the model is not asked.
    past: the conversation before this request. is_past_unstored: whether the store does not have it.
    window: the conversation with the input of this request, as far as the model sees it.
    input: what this request adds.
    hidden_files: files of the input that the model is not sent, each with its parameter path.
    first_request: the request of the first turn.
    """

    caller: Caller
    response: Response
    store: bool
    streamed: bool
    wants_contents: bool
    wants_encrypted_reasoning: bool
    generate: bool
    past: Sequence[ConversationSegment]
    is_past_unstored: bool
    window: ConversationWindow
    input: ConversationSegment
    hidden_files: Sequence[tuple[str, Attachment]]
    compaction: ContextCompactionConfig | None
    toolbox: Toolbox
    first_request: ModelRequest

    def check_files(self) -> None:
        """Raises InvalidRequest if neither the model nor any code can read a file."""
        for param, file in self.hidden_files:
            raise InvalidRequest(
                f"The file {file.name} cannot be shown to this model, which takes no such files, and the request has "
                "no code interpreter that could open it.",
                param=param,
                code="unsupported_file",
            )


class RequestPreparer:
    """Turns a request into a `PreparedRequest`, or rejects it.

    tools: hosted tools by each tool type that they serve.
    disabled_types: types of hosted tools that are switched off on this server.
    """

    def __init__(
        self,
        history: ConversationLoader,
        attachment_resolver: AttachmentResolver,
        models: ModelProvider,
        compactor: Compactor,
        tools: Mapping[str, HostedTool],
        disabled_types: frozenset[str],
        clock: Clock,
    ) -> None:
        self._history = history
        self._attachment_resolver = attachment_resolver
        self._models = models
        self._compactor = compactor
        self._tools = tools
        self._disabled_types = disabled_types
        self._clock = clock

    async def prepare(
        self,
        request: CreateResponse,
        caller: Caller,
        held_past: Sequence[ConversationSegment] | None = None,
        *,
        forward_files: bool = True,
        reserve_memory: ReserveMemory | None = None,
    ) -> PreparedRequest:
        """Validate and load. Raises ApiError.

        held_past: the conversation before the request, if the caller holds it instead of the store.
        forward_files: whether to send files to a model of which nobody has configured that it takes them.
        reserve_memory: as in `RunService.start`.
        """
        _reject_unsupported(request)
        if request.model is None:
            raise InvalidRequest(
                "Missing required parameter: 'model'.", param="model", code="missing_required_parameter"
            )
        specs = read_tools(request)
        compaction = self._read_compaction(request)
        past = await self._history.load_past(request, caller) if held_past is None else held_past
        reserve_if_large(reserve_memory, conversation_size(past))
        attached = await self._resolve_attachments(
            request, request.model, specs, caller, past, forward_files, reserve_memory
        )
        added = ConversationSegment(attached.entries)
        window = await run_in_worker(
            _count_sealed_bytes(past, added), self._compactor.build_window, caller, past, added
        )
        tools, hidden = NO_TOOLS, attached.hidden_files
        if specs:
            offered = await self._configure_tools(specs, caller, (window.tool_state, *window.segments))
            profile = self._models.get_backend(request.model).get_profile(request.model)
            tools = RequestTools.collect(specs, offered, profile)
            if any(self._tools[spec.type].finds_files for spec, _ in offered):
                hidden = ()
        choice = _NO_CHOICE if request.tool_choice is None else parse_tool_choice(request.tool_choice)
        tools.check_only_tool(len(specs))
        chosen = tools.choose(choice)
        response = self._build_initial_response(request, specs, choice, tools.warnings)
        return PreparedRequest(
            caller=caller,
            response=response,
            store=request.store is not False,
            streamed=bool(request.stream),
            wants_contents=INCLUDE_EXECUTION in (request.include or ()),
            wants_encrypted_reasoning=INCLUDE_ENCRYPTED_REASONING in (request.include or ()),
            generate=request.generate is not False,
            past=past,
            is_past_unstored=held_past is not None,
            window=window,
            input=added,
            hidden_files=hidden,
            compaction=compaction,
            toolbox=tools.build_toolbox(chosen.functions),
            first_request=ModelRequest(
                model=response.model,
                instructions=_read_instructions(request),
                segments=window.segments,
                function_tools=chosen.functions,
                server_tools=chosen.server_tools,
                tool_choice=chosen.choice,
                parallel_calls=response.parallel_tool_calls,
                sampling=_build_sampling(request),
                streamed=bool(request.stream),
            ),
        )

    async def _resolve_attachments(
        self,
        request: CreateResponse,
        model: str,
        specs: Sequence[ToolSpec],
        caller: Caller,
        past: Sequence[ConversationSegment],
        forward_files: bool,
        reserve_memory: ReserveMemory | None,
    ) -> ResolvedInput:
        entries = await self._history.load_input(request, caller, past, reserve_memory)

        def sends_files() -> bool:
            """If `takes_files` is not configured, send them when no hosted tool could open them."""
            takes = self._models.get_backend(model).get_profile(model).takes_files
            tools = [self._tools[spec.type] for spec in specs if spec.type in self._tools]
            return (forward_files and not any(tool.finds_files for tool in tools)) if takes is None else takes

        attached = await self._attachment_resolver.resolve(entries, caller, past, sends_files, reserve_memory)
        if attached.entries is not entries:
            check_size(attached.entries, past)
        return attached

    def _read_compaction(self, request: CreateResponse) -> ContextCompactionConfig | None:
        found: ContextCompactionConfig | None = None
        for number, raw in enumerate(request.context_management or ()):
            param = f"context_management[{number}]"
            if found is not None:
                raise InvalidRequest(
                    "Compaction can be asked for once; leave the others out.",
                    param=param,
                    code="invalid_value",
                )
            try:
                found = msgspec.json.decode(raw, type=ContextCompactionConfig)
            except msgspec.DecodeError as error:
                raise InvalidRequest(
                    f"{param} cannot be read: {error}.", param=param, code="invalid_value"
                ) from None
            if not self._compactor.is_enabled:
                raise InvalidRequest(
                    "This server does not compact.", param=param, code="unsupported_parameter"
                )
        return found

    async def _configure_tools(
        self, specs: Sequence[ToolSpec], caller: Caller, past: Sequence[ConversationSegment]
    ) -> list[tuple[ToolSpec, ConfiguredTool]]:
        offered: list[tuple[ToolSpec, ConfiguredTool]] = []
        for number, spec in enumerate(specs):
            if spec.type in self._disabled_types:
                raise InvalidRequest(f"{spec.type} is not enabled on this server.", param="tools")
            if spec.type.startswith("fumehood:") and spec.type not in self._tools:
                raise InvalidRequest(
                    f"There is no tool {spec.type[:100]!r}; hosted tools are {', '.join(sorted(self._tools))}.",
                    param=f"tools[{number}].type",
                    code="invalid_value",
                )
            if spec.type in self._tools:
                beside = [tool for _, tool in offered]
                tool = await self._tools[spec.type].configure(spec, caller, past, beside)
                if tool is not None:
                    offered.append((spec, tool))
        return offered

    def _build_initial_response(
        self,
        request: CreateResponse,
        specs: Sequence[ToolSpec],
        choice: ToolChoice,
        warnings: list[str],
    ) -> Response:
        """The response of `response.created`: the request with OpenAI's defaults."""
        text = request.text or TextConfig()
        return Response(
            id=new_id("resp"),
            created_at=int(self._clock.now()),
            model=request.model or "",
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            max_tool_calls=request.max_tool_calls,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            previous_response_id=request.previous_response_id,
            prompt_cache_key=request.prompt_cache_key,
            prompt_cache_retention=request.prompt_cache_retention,
            reasoning=request.reasoning or ReasoningConfig(),
            safety_identifier=request.safety_identifier,
            service_tier=_read_service_tier(request),
            store=request.store is not False,
            temperature=1.0 if request.temperature is None else request.temperature,
            text=TextConfig(format=text.format or TextFormat(), verbosity=text.verbosity or "medium"),
            tool_choice=choice.raw,
            tools=[Raw(self._echo_tool(spec)) for spec in specs],
            top_logprobs=request.top_logprobs or 0,
            top_p=1.0 if request.top_p is None else request.top_p,
            truncation=request.truncation or "disabled",
            metadata=request.metadata or {},
            user=UNSET if request.user is None else request.user,
            warnings=warnings or UNSET,
        )

    def _echo_tool(self, spec: ToolSpec) -> bytes:
        if spec.type in self._tools:
            return self._tools[spec.type].echo_spec(spec)
        if spec.type == "function":
            return msgspec.json.encode(decode_function(spec, "tools"))
        return redact_tool(spec)


def _count_sealed_bytes(past: Sequence[ConversationSegment], added: ConversationSegment) -> int:
    """Estimate how many bytes have to be unsealed to find the beginning of the window."""
    if added.compacted >= 0:
        return sum([len(entry.raw) for entry in added.entries[: added.compacted + 1]])
    index = last_compaction_index(past)
    return 0 if index < 0 else len(past[index].entries[past[index].compacted].raw)


def _reject_unsupported(request: CreateResponse) -> None:
    for name in ("background", "conversation", "prompt"):
        if getattr(request, name) not in (None, False):
            raise InvalidRequest(f"`{name}` is not served yet.", param=name, code="unsupported_parameter")
    form = request.text.format if request.text else None
    if form is not None and form.type == "json_schema" and (form.name is None or form.schema is None):
        missing = "name" if form.name is None else "schema"
        raise InvalidRequest(
            f"Missing required parameter: 'text.format.{missing}'.",
            param=f"text.format.{missing}",
            code="missing_required_parameter",
        )


# --- other parameters -----------------------------------------------------------------------------------------


def _read_instructions(request: CreateResponse) -> str | None:
    if request.instructions is None or isinstance(request.instructions, str):
        return request.instructions
    raise InvalidRequest("`instructions` must be a string.", param="instructions")


def _read_service_tier(request: CreateResponse) -> str:
    """The requested tier if it is a known one, else `default`."""
    return request.service_tier if request.service_tier in _SERVICE_TIERS else "default"


def _build_sampling(request: CreateResponse) -> GenerationParameters:
    return GenerationParameters(
        temperature=request.temperature,
        top_p=request.top_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logprobs=INCLUDE_LOGPROBS in (request.include or ()),
        top_logprobs=request.top_logprobs,
        max_output_tokens=request.max_output_tokens,
        text=request.text,
        reasoning=request.reasoning,
        service_tier=request.service_tier,
        prompt_cache_key=request.prompt_cache_key,
        safety_identifier=request.safety_identifier,
        user=request.user,
        passthrough=request.passthrough,
    )
