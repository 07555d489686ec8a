"""OpenTelemetry's semantic conventions: schema, variables, attributes, buckets, provider names, finish reasons."""

import logging
from collections.abc import Mapping

CAPTURE_CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
INPUT_MESSAGES, OUTPUT_MESSAGES = "gen_ai.input.messages", "gen_ai.output.messages"
SYSTEM_INSTRUCTIONS, TOOL_DEFINITIONS = "gen_ai.system_instructions", "gen_ai.tool.definitions"
TOOL_CALL_ARGUMENTS, TOOL_CALL_RESULT = "gen_ai.tool.call.arguments", "gen_ai.tool.call.result"
MAX_CONTENT_BYTES = 200_000  # backends truncate attributes, or reject spans, beyond 256 KB

# The buckets that the conventions advise for durations in seconds and for tokens.
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TOKEN_BUCKETS = tuple(4**power for power in range(14))

_PROVIDERS_BY_HOST = {
    "api.anthropic.com": "anthropic",
    "api.cohere.com": "cohere",
    "api.deepseek.com": "deepseek",
    "generativelanguage.googleapis.com": "gcp.gemini",
    "api.groq.com": "groq",
    "api.mistral.ai": "mistral_ai",
    "api.moonshot.ai": "moonshot_ai",
    "api.openai.com": "openai",
    "api.perplexity.ai": "perplexity",
    "api.x.ai": "x_ai",
}
_PROVIDERS_BY_SUFFIX = {
    ".openai.azure.com": "azure.ai.openai",
    ".services.ai.azure.com": "azure.ai.inference",
    ".aiplatform.googleapis.com": "gcp.vertex_ai",
    ".amazonaws.com": "aws.bedrock",
}
OWN_PROVIDER = "fumehood"
# The last version of the conventions that contains those of GenAI, which now have a repository of their own.
SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.0"

_FINISH_REASONS = {
    "calls": "tool_call",
    "max_output_tokens": "length",
    "failed": "error",
    "cancelled": "error",
}

# Whether content goes into spans and into events, by the value of CAPTURE_CONTENT_VARIABLE.
_CAPTURE_TARGETS = {
    "": (False, False),
    "false": (False, False),
    "no_content": (False, False),
    "true": (True, False),
    "span_only": (True, False),
    "event_only": (False, True),
    "span_and_event": (True, True),
}

logger = logging.getLogger(__name__)


def read_capture_targets(environ: Mapping[str, str]) -> tuple[bool, bool]:
    """Return whether content goes into spans and into events; neither for an unknown value, which is logged."""
    target = environ.get(CAPTURE_CONTENT_VARIABLE, "").strip().lower()
    if target not in _CAPTURE_TARGETS:
        logger.warning("%s: %r is not known; no content is recorded", CAPTURE_CONTENT_VARIABLE, target)
    return _CAPTURE_TARGETS.get(target, (False, False))


def propagates_trace_context(environ: Mapping[str, str]) -> bool:
    """Whether `OTEL_PROPAGATORS` includes `tracecontext`, which it does by default."""
    names = environ.get("OTEL_PROPAGATORS") or "tracecontext"
    return "tracecontext" in (name.strip() for name in names.split(","))


def map_finish_reason(end: str) -> str:
    """Return the finish reason in the words of the conventions."""
    return _FINISH_REASONS.get(end, end)


def map_provider(server: tuple[str, int] | None, own_provider: str = OWN_PROVIDER) -> str:
    """Return the vendor that runs a known host; `own_provider` for any other host, or none."""
    if server is None:
        return own_provider
    host = server[0].lower()
    for ending, name in _PROVIDERS_BY_SUFFIX.items():
        if host.endswith(ending):
            return name
    return _PROVIDERS_BY_HOST.get(host, own_provider)
