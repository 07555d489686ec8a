"""What the conventions call whoever runs a model's server; imports nothing."""

# Those whose servers are known by their names.
_VENDORS = {
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
_VENDORS_BELOW = {
    ".openai.azure.com": "azure.ai.openai",
    ".services.ai.azure.com": "azure.ai.inference",
    ".aiplatform.googleapis.com": "gcp.vertex_ai",
    ".amazonaws.com": "aws.bedrock",
}
OWN = "fumehood"


def provider_of(server: tuple[str, int] | None) -> str:
    """The vendor's name; ours where the server is anybody's, or is no server at all."""
    if server is None:
        return OWN
    host = server[0].lower()
    for ending, name in _VENDORS_BELOW.items():
        if host.endswith(ending):
            return name
    return _VENDORS.get(host, OWN)
