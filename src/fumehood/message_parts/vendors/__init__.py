"""The vendor codecs by name."""

from fumehood.message_parts.vendors import (
    anthropic,
    azure,
    bedrock,
    bedrock_agents,
    gemini,
    gemini_interactions,
    mistral,
    openai,
    xai,
)

VENDORS = {
    module.VENDOR.name: module.VENDOR
    for module in (
        openai,
        anthropic,
        gemini,
        gemini_interactions,
        azure,
        bedrock,
        bedrock_agents,
        mistral,
        xai,
    )
}
