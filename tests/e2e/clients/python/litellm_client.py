"""LiteLLM as its users call it: completion, streaming, tools, embeddings and errors. Prints what it got as JSON."""

import json
import sys

import litellm

URL, KEY = sys.argv[1:3]
litellm.telemetry = False
litellm.suppress_debug_info = True  # it prints advice to standard output
COMMON = {"api_base": URL, "api_key": KEY, "num_retries": 0, "timeout": 60}
QUESTION = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}


def main() -> None:
    told: dict[str, object] = {}
    whole = litellm.completion(model="openai/small-chat", messages=QUESTION, **COMMON)
    told["text"] = whole.choices[0].message.content
    told["tokens"] = whole.usage.total_tokens
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in litellm.completion(model="openai/small-chat", messages=QUESTION, stream=True, **COMMON)
        if chunk.choices
    ]
    told["pieces"], told["streamed"] = len(pieces), "".join(pieces)
    call = litellm.completion(model="openai/small-chat", messages=QUESTION, tools=[TOOL], **COMMON)
    function = call.choices[0].message.tool_calls[0].function
    told["call"] = [function.name, json.loads(function.arguments)]
    vectors = litellm.embedding(model="openai/small-embed", input=["a", "bcd"], **COMMON)
    told["vectors"] = [row["embedding"] for row in vectors.data]
    try:
        litellm.completion(model="openai/nobody", messages=QUESTION, **COMMON)
    except litellm.exceptions.NotFoundError as error:
        told["error"] = str(error)
    print(json.dumps(told))


main()
