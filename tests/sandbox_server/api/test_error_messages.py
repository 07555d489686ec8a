"""Error messages name what is wrong and what to do."""

import errno
import json
import logging

import msgspec
import pytest

from fumehood.protocol.sandbox.sandbox_errors import InvalidSandboxRequest, SandboxFileNotFound
from fumehood.protocol.sandbox.sandbox_messages import ExecuteRequest, SandboxSpec
from fumehood.sandbox_server import structured_logging
from fumehood.sandbox_server.api.sandbox_http_exchange import decode_json
from fumehood.sandbox_server.supervisor.sandbox_files import to_file_error

SPEC = msgspec.json.Decoder(SandboxSpec)
EXECUTE = msgspec.json.Decoder(ExecuteRequest)


@pytest.mark.parametrize(
    ("decoder", "body", "param", "said"),
    [
        (SPEC, {"memroy": "1g"}, "memroy", "unknown field `memroy`; did you mean `memory`?"),
        (SPEC, {"xyzzy": 1}, "xyzzy", "unknown field `xyzzy`."),
        (SPEC, {"x" * 200: 1}, None, "unknown field"),
        (SPEC, {"memory": "2g"}, "memory", "'2g' - at `$.memory`; it is one of 1g, 4g, 16g, 64g."),
        (SPEC, {"network": {"type": "disabled", "x": 1}}, "network", "unknown field `x`"),
        (EXECUTE, {"cod": "1"}, "cod", "did you mean `code`?"),
        (EXECUTE, {"code": 1}, "code", "Expected `str`, got `int`"),
    ],
)
def test_fields_of_a_request(
    decoder: msgspec.json.Decoder[object], body: dict[str, object], param: str | None, said: str
) -> None:
    with pytest.raises(InvalidSandboxRequest) as refused:
        decode_json(decoder, json.dumps(body).encode())
    assert said in str(refused.value)
    assert refused.value.param == param


def test_a_missing_file_is_told_without_the_name_of_a_system_call() -> None:
    error = to_file_error("a.txt", OSError(errno.ENOENT, "openat2: No such file or directory"))
    assert isinstance(error, SandboxFileNotFound)
    assert str(error) == "a.txt: No such file or directory"


@pytest.mark.parametrize("form", ["json", "text"])
def test_requests_of_an_allow_list_keep_their_fields_in_the_log(
    form: structured_logging.LogFormat, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for switch in ("logThreads", "logProcesses", "logMultiprocessing"):
        monkeypatch.setattr(logging, switch, True)  # put back afterwards
    before = {
        name: list(logging.getLogger(name).handlers) for name in ("fumehood", "uvicorn", "opentelemetry")
    }
    try:
        structured_logging.configure_logging(form, logging.INFO)
        structured_logging.log_event(
            "egress_request", instance="0123", domain="example.org", port=443, verdict="allowed", reason=""
        )
        logging.getLogger("opentelemetry.exporter").error("not %s", "sent")
    finally:
        for name, handlers in before.items():
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = handlers, True
            logger.setLevel(logging.NOTSET)
    line, others = capsys.readouterr().err.splitlines()
    if form == "text":
        assert others.endswith(" error   not sent")
        assert "egress_request instance=0123 domain=example.org port=443 verdict=allowed" in line
    else:
        assert json.loads(others)["message"] == "not sent"
        found = json.loads(line)
        assert (found["event"], found["instance"], found["domain"]) == (
            "egress_request",
            "0123",
            "example.org",
        )
