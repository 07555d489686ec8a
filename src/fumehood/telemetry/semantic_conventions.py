"""What OpenTelemetry's conventions say that all of telemetry keeps to: names, bounds, vendors."""

CAPTURE_CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
PROPAGATORS_VARIABLE = "OTEL_PROPAGATORS"
MAX_CONTENT_BYTES = 200_000  # bytes of content: backends cut attributes, or refuse spans, beyond 256 KB

# As they advise, for whatever takes seconds, and for tokens.
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TOKEN_BUCKETS = tuple(4**power for power in range(14))

# Those whose servers are known by their names.
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
    """Why a model stopped, in the words of the conventions."""
    return _FINISH_REASONS.get(end, end)


def map_provider(server: tuple[str, int] | None) -> str:
    """The vendor's name; ours where the server is anybody's, or is no server at all."""
    if server is None:
        return OWN_PROVIDER
    host = server[0].lower()
    for ending, name in _PROVIDERS_BY_SUFFIX.items():
        if host.endswith(ending):
            return name
    return _PROVIDERS_BY_HOST.get(host, OWN_PROVIDER)
