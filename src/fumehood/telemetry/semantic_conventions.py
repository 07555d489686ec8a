"""OpenTelemetry's GenAI semantic conventions: variables, buckets, provider names and finish reasons."""

CAPTURE_CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
PROPAGATORS_VARIABLE = "OTEL_PROPAGATORS"
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

_FINISH_REASONS = {
    "calls": "tool_call",
    "max_output_tokens": "length",
    "failed": "error",
    "cancelled": "error",
}


def map_finish_reason(end: str) -> str:
    """Return the finish reason in the words of the conventions."""
    return _FINISH_REASONS.get(end, end)


def map_provider(server: tuple[str, int] | None) -> str:
    """Return the vendor that runs a known host; fumehood for any other host, or none."""
    if server is None:
        return OWN_PROVIDER
    host = server[0].lower()
    for ending, name in _PROVIDERS_BY_SUFFIX.items():
        if host.endswith(ending):
            return name
    return _PROVIDERS_BY_HOST.get(host, OWN_PROVIDER)
