"""What clients may say to a model server's template."""

import pytest
from msgspec import Raw

from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.passthrough_fields import check_passthrough_fields


@pytest.mark.parametrize("name", ["chat_template", "tools", "add_generation_prompt", "tokenize"])
def test_arguments_of_a_template_do_not_replace_what_is_decided_here(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"must not contain '{name}'") as refused:
        check_passthrough_fields(
            {"chat_template_kwargs": Raw(b'{"enable_thinking":false,"%b":null}' % name.encode())}
        )
    assert refused.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("arguments", [b'{"enable_thinking":false}', b"{}", b"[1]", b'"x"'])
def test_other_arguments_are_left_to_the_server(arguments: bytes) -> None:
    check_passthrough_fields({"chat_template_kwargs": Raw(arguments), "seed": Raw(b"1")})
