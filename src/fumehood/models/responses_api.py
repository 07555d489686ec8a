"""Models behind a server that speaks the Responses API itself; imports msgspec, siblings and `protocol`.

The server is asked for single turns and keeps nothing: every request has the whole conversation. The tools that are
hosted here are plain functions to it.
"""

import msgspec
from msgspec import Raw

from fumehood.models.answers import TurnReader
from fumehood.models.kept_renderings import with_list
from fumehood.models.model_server import ModelServer
from fumehood.models.responses_parsing import ResponsesParser
from fumehood.models.responses_rendering import Dialect, ResponsesRenderer
from fumehood.models.sealed import Origin
from fumehood.models.settings import Fields, ModelSettings, Secret
from fumehood.models.upstream import Upstream
from fumehood.models.upstream_errors import UpstreamErrors
from fumehood.protocol.folding import ENCRYPTED_REASONING, LOGPROBS
from fumehood.protocol.models import ModelRequest, Sampling
from fumehood.protocol.tools import FunctionSpec

_PASSED_ON = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "max_output_tokens",
    "service_tier",
    "prompt_cache_key",
    "safety_identifier",
    "user",
)
# Of a request, what a counter of its tokens wants to know.
_COUNTED = ("model", "instructions", "tools", "tool_choice", "parallel_tool_calls", "reasoning", "text")


class _Function(msgspec.Struct, tag_field="type", tag="function"):
    """`strict` is always said: without it, it would be true."""

    name: str
    description: str
    parameters: Raw
    strict: bool


class ResponsesApi(ModelServer):
    """A `ModelBackend` over a server that has the Responses API itself."""

    api = "Responses API"
    path = "/responses"

    def __init__(self, settings: ModelSettings, upstream: Upstream, key: Secret | None = None) -> None:
        super().__init__(settings, upstream, key)
        self._customs = settings.passes("custom")
        self._renderer = ResponsesRenderer(
            Dialect(
                takes_images=settings.takes_images,
                developer_role=settings.developer_role,
                replay_reasoning=settings.replay_reasoning,
                customs=self._customs,
                foreign=any(kind != "custom" for kind in settings.pass_tools),
                takes_files=bool(settings.shows_files),
            )
        )

    def check(self, request: ModelRequest) -> None:
        self._input(request)

    # ---- what is sent -----------------------------------------------------------------------------------------

    def _body(self, request: ModelRequest) -> list[bytes]:
        fields = self._fields(request)
        include: list[str] = []
        if self._settings.encrypted_reasoning:
            include.append(ENCRYPTED_REASONING)
        if request.sampling.logprobs:
            include.append(LOGPROBS)
        if include:
            fields["include"] = include
        self._settings.put_passed(fields, request.sampling.passed)
        self._settings.put_extra(fields)
        return self._with_input(request, fields)

    def _counted(self, request: ModelRequest) -> list[bytes]:
        fields = {name: value for name, value in self._fields(request).items() if name in _COUNTED}
        return self._with_input(request, fields)

    def _with_input(self, request: ModelRequest, fields: Fields) -> list[bytes]:
        return with_list("input", self._input(request), fields)

    def _input(self, request: ModelRequest) -> list[bytes]:
        """Raises InvalidRequest."""
        return self._renderer.input(request.segments, self._origin(request))

    def _origin(self, request: ModelRequest) -> Origin:
        return Origin.of(self._settings.base_url or "", self._settings.name or request.model)

    def _fields(self, request: ModelRequest) -> Fields:
        fields: Fields = {
            "model": self._settings.name or request.model,
            "stream": request.streamed,
            "store": False,
        }
        if request.instructions:
            fields["instructions"] = request.instructions
        self._add_tools(fields, request)
        _add_sampling(fields, request.sampling)
        return fields

    def _add_tools(self, fields: Fields, request: ModelRequest) -> None:
        tools: list[object] = [self._tool(spec) for spec in request.functions]
        tools += [Raw(spec.raw) for spec in request.others if self._settings.passes(spec.type)]
        if not tools:
            return
        fields["tools"] = tools
        choice = request.choice
        if isinstance(choice, FunctionSpec):
            kind = "custom" if choice.custom and self._customs else "function"
            fields["tool_choice"] = {"type": kind, "name": choice.name}
        elif choice != "auto":  # the default
            fields["tool_choice"] = choice
        if not request.parallel_calls:
            fields["parallel_tool_calls"] = False

    def _tool(self, spec: FunctionSpec) -> object:
        if spec.custom and self._customs:
            return Raw(spec.custom)
        return _Function(spec.name, spec.description, spec.parameters, spec.strict)

    # ---- what comes -------------------------------------------------------------------------------------------

    def _reader(self, request: ModelRequest, errors: UpstreamErrors) -> TurnReader:
        return ResponsesParser(errors, self._origin(request))


def _add_sampling(fields: Fields, sampling: Sampling) -> None:
    for name in _PASSED_ON:
        value = getattr(sampling, name)
        if value is not None:
            fields[name] = value
    for name in ("text", "reasoning"):
        config = getattr(sampling, name)
        if config is not None:
            said = {key: value for key, value in msgspec.structs.asdict(config).items() if value is not None}
            if said:
                fields[name] = said
