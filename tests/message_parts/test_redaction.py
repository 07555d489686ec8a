"""Redaction of parts, digests of inline data, and truncation."""

import base64
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fumehood.message_parts import (
    TRUNCATED_FIELD,
    TRUNCATED_PART_TYPE,
    drop_vendor_items,
    redact_parts,
    replace_inline_data,
    truncate_parts,
)
from fumehood.message_parts.canonical_parts import (
    Json,
    Part,
    TextPart,
    ToolCallResponsePart,
    ToolPart,
    UriPart,
)
from fumehood.message_parts.conversion import from_vendor, to_vendor
from fumehood.message_parts.json_path_access import is_same_json
from fumehood.message_parts.otel_parts import from_representation, to_representation
from fumehood.message_parts.part_schema import REPRESENTATIONS, find_part_error
from fumehood.message_parts.validation import validate
from tests.support.vendor_item_samples import DOCUMENTS, OPENAI, SAMPLES

SECRET = "sk-live-1"
PICTURE = b"\x89PNG\r\n\x1a\n"
DATA = base64.b64encode(PICTURE).decode()
DIGEST = f"sha256:{hashlib.sha256(PICTURE).hexdigest()}"


# What names, types and ties things, wherever the vendors have it.
NAMES = frozenset(
    {"type", "role", "status", "name", "id", "call_id", "object", "tool_use_id", "toolUseId", "tool_call_id"}
    | {"approval_request_id", "mime_type", "media_type", "file_id", "file_type", "format", "execution"}
)


def insert_secret(value: Json) -> Json:
    """Every other text of the sample with a secret at its end."""
    if isinstance(value, str):
        return f"{value} {SECRET}"
    if isinstance(value, list):
        return [insert_secret(inner) for inner in value]
    if isinstance(value, dict):
        return {key: inner if key in NAMES else insert_secret(inner) for key, inner in value.items()}
    return value


def dump_parts(parts: list[Part]) -> str:
    return json.dumps([to_representation(representation, parts) for representation in REPRESENTATIONS])


@pytest.mark.parametrize("vendor", ["openai", "anthropic", "gemini-interactions", "bedrock", "mistral"])
def test_redacted_text_remains_nowhere(vendor: str) -> None:
    """Not in the payload, and not in what travels for the way back."""
    items = insert_secret(SAMPLES[vendor])
    parts = from_vendor(vendor, items)
    assert SECRET in dump_parts(parts)
    clean = redact_parts(parts, lambda text: text.replace(SECRET, "[redacted]"))
    assert SECRET not in dump_parts(clean)
    assert SECRET in dump_parts(parts), "what was given is not changed"
    back = to_vendor(vendor, clean)
    assert is_same_json(back, json.loads(json.dumps(items).replace(SECRET, "[redacted]")))


def test_the_envelope_is_redacted_too() -> None:
    document: Any = {"output": [OPENAI[2]], "instructions": SECRET}
    clean = redact_parts(from_vendor("openai", document), lambda text: text.replace(SECRET, "x"))
    assert SECRET not in dump_parts(clean)
    assert to_vendor("openai", clean) == {**document, "instructions": "x"}


def test_arguments_named_like_structural_fields_are_redacted() -> None:
    """A member that is a name or an id to a vendor is content in the arguments of a call."""
    arguments: Json = {"name": SECRET, "id": SECRET, "type": SECRET, "status": [{"role": SECRET}]}
    use: Json = {"type": "tool_use", "id": "t", "name": "f", "input": arguments}
    clean = redact_parts(from_vendor("anthropic", [use]), lambda text: text.replace(SECRET, "x"))
    assert SECRET not in dump_parts(clean)


@pytest.mark.parametrize("secret", ['Zoë "Z"', "two\nlines", "back\\slash", "tab\t"])
@pytest.mark.parametrize("deep", [1, 2, 3])
def test_escapes_of_json_in_a_text_hide_nothing(secret: str, deep: int) -> None:
    """Arguments and results are often JSON in a text, and that again may be in one."""
    text: Any = secret
    for _ in range(deep):
        text = json.dumps({"who": text, "n": [1.0, None, "é"]})
    call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": text}
    answer: Any = {"type": "function_call_output", "call_id": "c", "output": text}
    clean = redact_parts(
        from_vendor("openai", [call, answer]), lambda text: text.replace(secret, "[redacted]")
    )
    for part in clean:
        assert isinstance(part, ToolPart)
        (found,) = part.payload.values()
        for _ in range(deep):
            members: Any = json.loads(str(found))
            assert members["n"] == [1.0, None, "é"]
            found = members["who"]
        assert found == "[redacted]"


def test_json_that_hides_nothing_stays_as_it_was_written() -> None:
    for text in ('{"a":  "\\u00e9\\n"}', '{"a": "\\n', '["\\ud800"]', "{ \\", '"\\n"'):
        call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": text}
        assert to_vendor("openai", redact_parts(from_vendor("openai", [call]), lambda text: text)) == [call]


@pytest.mark.parametrize("depth", [10, 300, 500, 900, 50_000])
def test_json_nested_too_deeply_is_not_recorded(depth: int) -> None:
    text = "[" * depth + json.dumps(f"é{SECRET}") + "]" * depth
    call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": text}
    (clean,) = redact_parts(from_vendor("openai", [call]), lambda text: text.replace(f"é{SECRET}", "x"))
    assert SECRET not in dump_parts([clean])


@pytest.mark.parametrize("vendor", SAMPLES)
def test_everything_may_be_redacted(vendor: str) -> None:
    """Parts are parts when no text is left in them."""
    clean = redact_parts(from_vendor(vendor, SAMPLES[vendor]), lambda _: "")
    for representation in REPRESENTATIONS:
        assert validate([*to_representation(representation, clean)]) == []
    assert "print(2)" not in dump_parts(clean)


def test_parts_without_vendor_items_keep_their_payloads() -> None:
    parts = drop_vendor_items(from_vendor("openai", SAMPLES["openai"]))
    text = json.dumps(to_representation("option2", parts))
    assert '"item"' not in text
    assert '"moved"' not in text
    again = from_representation(json.loads(text))
    assert [(part.kind, part.payload) for part in again if isinstance(part, ToolPart)] == [
        (part.kind, part.payload) for part in parts if isinstance(part, ToolPart)
    ]
    made: Any = to_vendor("openai", again)
    (first, *_) = [item for item in made if item["type"] == "code_interpreter_call"]
    assert first == {**OPENAI[2], "id": "ci_1"}


# --- data ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vendor", SAMPLES)
def test_data_is_replaced_by_its_digest(vendor: str) -> None:
    parts = replace_inline_data(from_vendor(vendor, SAMPLES[vendor]))
    assert DATA not in dump_parts(parts)
    for representation in REPRESENTATIONS:
        assert validate([*to_representation(representation, parts)]) == []
    if DATA in json.dumps(SAMPLES[vendor]):
        assert DIGEST in dump_parts(parts)
        assert f"urn:{DIGEST}" in json.dumps(to_vendor(vendor, parts))


@pytest.mark.parametrize("image", [DATA, f"data:image/png;base64,{DATA}"])
def test_an_image_becomes_a_reference_with_its_size(image: str) -> None:
    drawn: Any = {"type": "image_generation_call", "id": "ig", "status": "completed", "result": image}
    parts = replace_inline_data(from_vendor("openai", [drawn, OPENAI[0]]))
    result = parts[1]
    assert isinstance(result, ToolCallResponsePart)
    reference = {
        "type": "uri",
        "modality": "image",
        "uri": f"urn:{DIGEST}",
        "digest": DIGEST,
        "bytes": len(PICTURE),
    }
    url_fields = {} if image == DATA else {"digest": DIGEST, "bytes": len(PICTURE)}
    assert result.payload == {"result": reference, **url_fields}
    (picture,) = [part for part in parts if isinstance(part, UriPart) and part.uri.startswith("urn:")]
    assert (picture.modality, picture.mime_type) == ("image", "image/png")
    assert picture.extra == {"digest": DIGEST, "bytes": len(PICTURE)}
    screenshot: Any = {"type": "computer_call_output", "call_id": "c", "output": {
        "type": "computer_screenshot", "image_url": f"data:image/png;base64,{DATA}"}}  # fmt: skip
    (shown,) = replace_inline_data(from_vendor("openai", [screenshot]))
    assert isinstance(shown, ToolCallResponsePart)
    assert shown.payload["output"] == {
        "type": "computer_screenshot",
        "image_url": f"urn:{DIGEST}",
        "digest": DIGEST,
        "bytes": len(PICTURE),
    }


@pytest.mark.parametrize(
    ("vendor", "item"),
    [
        ("openai", {"type": "message", "role": "user", "content": [
            {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}},
            {"type": "input_file", "filename": "a.pdf", "file_data": DATA}]}),
        ("openai", {"type": "function_call_output", "call_id": "c", "output": [
            {"type": "input_file", "filename": "a.pdf", "file_data": DATA}]}),
        ("gemini", {"functionResponse": {"name": "f", "response": {}, "parts": [
            {"inlineData": {"mimeType": "image/png", "data": DATA}}]}}),
        ("gemini-interactions", {"type": "image", "data": DATA, "mime_type": "image/png"}),
        ("bedrock", {"toolResult": {"toolUseId": "t", "content": [
            {"image": {"format": "png", "source": {"bytes": DATA}}}]}}),
        ("bedrock-agents", {"files": {"files": [{"bytes": DATA, "name": "a.png", "type": "image/png"}]}}),
        ("openai", {"type": "message", "role": "assistant", "content": [
            {"type": "output_audio", "data": DATA, "transcript": "hi"}]}),
        ("openai", {"type": "image_generation_call", "id": "i", "status": "generating", "result": None,
                    "partial_image_b64": DATA}),
        ("openai", {"type": "function_call_output", "call_id": "c", "output":
            json.dumps({"picture": f"data:image/png;base64,{DATA}", "ok": True})}),
        ("openai", {"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": f"![a](data:image/png;base64,{DATA}) and more"}]}),
        ("gemini-interactions", {"type": "function_result", "call_id": "c", "result": [
            {"type": "image", "data": DATA}]}),
        ("gemini-interactions", {"type": "mcp_server_tool_result", "call_id": "c", "result": [
            {"type": "resource", "resource": {"uri": "u", "mimeType": "image/png", "blob": DATA}}]}),
        ("mistral", {"object": "entry", "type": "message.input", "role": "user", "content": [
            {"type": "input_audio", "input_audio": DATA}]}),
    ],
)  # fmt: skip
def test_data_is_found_wherever_a_vendor_puts_it(vendor: str, item: Any) -> None:
    parts = replace_inline_data(from_vendor(vendor, [item]))
    assert DATA not in dump_parts(parts)
    assert DIGEST in dump_parts(parts)
    for representation in REPRESENTATIONS:
        assert [
            problem for problem in map(find_part_error, to_representation(representation, parts)) if problem
        ] == []
    assert DATA not in json.dumps(to_vendor(vendor, parts))


@pytest.mark.parametrize(
    ("vendor", "item"),
    [
        ("openai", {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "SEALED-by us_"}),
        ("openai", {"type": "compaction", "id": "cmp_1", "encrypted_content": "SEALED-by us_"}),
        ("anthropic", {"type": "web_search_tool_result", "tool_use_id": "c", "content": [
            {"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "SEALED-by us_"}]}),
        ("xai", {"role": "ROLE_ASSISTANT", "content": "2", "encrypted_content": "SEALED-by us_"}),
    ],
)  # fmt: skip
def test_sealed_content_is_replaced_too(vendor: str, item: Any) -> None:
    text = dump_parts(replace_inline_data(from_vendor(vendor, [item])))
    assert "SEALED" not in text
    assert hashlib.sha256(b"SEALED-by us_").hexdigest() in text


@pytest.mark.parametrize("result", ["https://e.x/cat.png", "I drew a cat.", "I drew cats"])
def test_an_image_that_is_not_inline_is_not_replaced(result: str) -> None:
    drawn: Any = {"type": "image_generation_call", "id": "ig", "status": "completed", "result": result}
    assert to_vendor("openai", replace_inline_data(from_vendor("openai", [drawn]))) == [drawn]


LONG = bytes(range(256))
SPELLINGS = {
    "of URLs": base64.urlsafe_b64encode(LONG).decode(),
    "without its end": base64.b64encode(LONG).decode().rstrip("="),
    "in lines": base64.encodebytes(LONG).decode(),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    ("vendor", "frame"),
    [
        ("gemini", '{"inlineData": {"mimeType": "image/png", "data": @}}'),
        ("gemini", '{"functionResponse": {"name": "f", "parts": [{"inline_data": {"mime_type": "a/b", "data": @}}]}}'),
        ("openai", '{"type": "image_generation_call", "id": "i", "status": "completed", "result": @}'),
        ("bedrock", '{"toolResult": {"toolUseId": "t", "content": [{"image": {"source": {"bytes": @}}}]}}'),
        ("anthropic", '{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": @}}'),
    ],
)  # fmt: skip
def test_base64_is_data_in_any_spelling(vendor: str, frame: str, spelling: str) -> None:
    """Google's own SDK writes it as in URLs."""
    item: Json = json.loads(frame.replace("@", json.dumps(SPELLINGS[spelling])))
    text = dump_parts(replace_inline_data(from_vendor(vendor, [item])))
    assert SPELLINGS[spelling][:40] not in text
    assert hashlib.sha256(LONG).hexdigest() in text
    assert f'"bytes": {len(LONG)}' in text


def test_only_data_urls_in_a_text_are_replaced() -> None:
    """And what only looks like an address of data is a text."""
    for text in ("data:", "see data:image/png;base64", "data:;base64 is how it begins", "update:x;base64,"):
        text_part: Any = {"type": "message", "role": "user", "content": text}
        assert to_vendor("openai", replace_inline_data(from_vendor("openai", [text_part]))) == [text_part]
    twice = f"(data:image/png;base64,{DATA}), <data:a/b;c=d;base64,{DATA}>"
    (shown,) = replace_inline_data(from_vendor("anthropic", [{"type": "text", "text": twice}]))
    assert isinstance(shown, TextPart)
    assert shown.content == f"(urn:{DIGEST}), <urn:{DIGEST}>"


def test_fields_named_data_without_base64_are_unchanged() -> None:
    for value in ("two words", "abc", "12345678", "a_b-", ""):
        rows = [{"format": "x", "data": value}]
        table: Any = {"type": "function_call_output", "call_id": "c", "output": rows}
        assert to_vendor("openai", replace_inline_data(from_vendor("openai", [table]))) == [table]
    asked: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "data": DATA}
    assert to_vendor("openai", replace_inline_data(from_vendor("openai", [asked]))) == [asked]


# --- bounds -------------------------------------------------------------------------------------------


def size(value: Any) -> int:
    return len(json.dumps(value).encode())


def call(code: str, **more: Any) -> dict[str, Any]:
    payload = {"type": "code_interpreter", "code": code}
    return {
        "type": "server_tool_call",
        "id": "1",
        "name": "code_interpreter",
        "server_tool_call": payload,
        **more,
    }


def test_parts_within_the_limit_are_unchanged() -> None:
    parts: list[Any] = [call("print(2)")]
    assert truncate_parts(parts, size(parts)) is parts


def test_truncation_drops_vendor_items_then_texts_then_parts() -> None:
    parts: list[Any] = [
        call("x" * 50_000, **{"fumehood.source": {"vendor": "v", "item": "y" * 10_000}}),
        call("z"),
    ]
    assert truncate_parts(parts, 55_000) == [
        call("x" * 50_000, **{TRUNCATED_FIELD: {"fumehood.source": True}}),
        call("z"),
    ]
    (first, second) = truncate_parts(parts, 20_000)
    assert first == call(
        "x" * 16_384, **{TRUNCATED_FIELD: {"fumehood.source": True, "server_tool_call.code": 50_000 - 16_384}}
    )
    assert second == call("z")
    (*remaining, mark) = truncate_parts([*parts, *([call("z")] * 500)], 1000)
    assert mark == {"type": TRUNCATED_PART_TYPE, "parts": 502 - len(remaining)}
    assert remaining[0]["server_tool_call"] == {"type": "code_interpreter", "code": "x" * 64}
    assert remaining[1] == call("z")


def test_truncated_fields_are_listed() -> None:
    """Of payloads the type is remaining; a member of the arguments may be called so, too."""
    payload = {"type": "function", "arguments": {"type": "z" * 1000}}
    asked: Any = {"type": "tool_call", "id": "1", "name": "f", "tool_call": payload, "arguments": payload}
    (cut,) = truncate_parts([asked], 400)
    gone = 1000 - 64
    assert cut["tool_call"] == {"type": "function", "arguments": {"type": "z" * 64}}
    assert cut[TRUNCATED_FIELD] == {"tool_call.arguments.type": gone, "arguments.arguments.type": gone}
    (shown,) = truncate_parts([{**asked, "arguments": {"type": "z" * 1000}}], 400)
    assert shown["arguments"] == {"type": "z" * 64}
    assert shown[TRUNCATED_FIELD] == {"tool_call.arguments.type": gone, "arguments.type": gone}


def test_earlier_truncations_stay_listed() -> None:
    text_part: Any = {"type": "text", "content": "a" * 1000, TRUNCATED_FIELD: {"content": 5, "type": 1}}
    (again,) = truncate_parts([{**text_part, "fumehood.source": {"vendor": "v", "item": "b" * 1000}}], 1200)
    assert again == {**text_part, TRUNCATED_FIELD: {"content": 5, "type": 1, "fumehood.source": True}}
    (again,) = truncate_parts([text_part], 300)
    assert again == {
        "type": "text",
        "content": "a" * 64,
        TRUNCATED_FIELD: {"content": 5 + 1000 - 64, "type": 1},
    }


def replace_texts(value: Json, text: str) -> Json:
    if isinstance(value, list):
        return [replace_texts(inner, text) for inner in value]
    if isinstance(value, dict):
        return {key: replace_texts(inner, text) for key, inner in value.items()}
    return text if value == "print(2)" else value


@pytest.mark.parametrize("vendor", SAMPLES)
@settings(max_examples=10)
@given(limit=st.integers(0, 60_000), text=st.text(min_size=1, max_size=3))
def test_whatever_is_cut_is_valid_and_within_the_bound(vendor: str, limit: int, text: str) -> None:
    long = replace_texts(SAMPLES[vendor], text * 9000)
    for representation in REPRESENTATIONS:
        cut = truncate_parts(to_representation(representation, from_vendor(vendor, long)), limit)
        assert len(json.dumps(cut, separators=(",", ":"))) <= limit or not cut
        assert [problem for problem in validate([*cut]) if "no call" not in problem.reason] == []


def test_documents_are_bounded_as_items_are() -> None:
    for vendor, document in DOCUMENTS:
        for part in truncate_parts(to_representation("option2", from_vendor(vendor, document)), 3000):
            assert validate(part) == [] or "no call before it" in str(validate(part)[0])
