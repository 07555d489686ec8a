"""Heads of requests in any form are refused or parsed unambiguously."""

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fumehood.sandbox_server.egress.control_messages import ProxyLimits
from fumehood.sandbox_server.egress.domain_parsing import RequestTarget
from fumehood.sandbox_server.egress.request_parsing import (
    ForwardedRequest,
    ProxyRefusal,
    bad_request,
    parse_head,
    response_headers,
    validate_request,
)

LIMITS = ProxyLimits()
TLS_AUTHORITY = RequestTarget("data.test", 443)

LINES = [
    *(
        "Host: data.test",
        "Host: other.test",
        "host:data.test:80",
        "Content-Length: 3",
        "content-length: 03, 3",
    ),
    *(
        "Transfer-Encoding: chunked",
        "Transfer-Encoding: Chunked, chunked",
        "Connection: close, x-a",
        "X-A: 1",
    ),
    *(
        "Connection: host",
        "Upgrade: h2c",
        "Expect: 100-continue",
        "Proxy-Authorization: Basic eA==",
        "TE: trailers",
    ),
    *("X: a\r\n b", "X: \0", "X: a\rb", "X : 1", ": x", "X", "Keep-Alive: 5", "Trailer: Host", "Cookie: $A"),
]
TARGETS = [
    *(
        "http://data.test/",
        "http://data.test",
        "HTTP://DATA.test.:80/a?b#c",
        "http://data.test:443/",
        "/",
        "*",
    ),
    *(
        "http://data.test@other.test/",
        "http://other.test/",
        "https://data.test/",
        "data.test:443",
        "//data.test/",
    ),
    *("http://data.test?x", "http://data.test\\@other.test/", "http://data.test%00/", "http://[::1]/", ""),
]


def read(head: bytes, tls_authority: RequestTarget | None) -> ForwardedRequest | None:
    try:
        return validate_request(parse_head(head, LIMITS)[1], tls_authority)
    except ProxyRefusal:
        return None


def check(asked: ForwardedRequest) -> None:
    """What is passed on names one server, once, and one length; nothing of the hop is left."""
    names = [name.lower() for name, _ in asked.headers]
    assert names.count(b"host") == 1
    assert names.count(b"content-length") + names.count(b"transfer-encoding") <= 1
    assert not set(names) & {
        b"connection",
        b"upgrade",
        b"te",
        b"trailer",
        b"proxy-authorization",
        b"keep-alive",
    }
    if asked.method == b"CONNECT":
        return
    written = h11.Connection(h11.CLIENT).send(
        h11.Request(method=asked.method, target=asked.target, headers=asked.headers)
    )
    assert written is not None
    head, _, rest = written.partition(b"\r\n\r\n")
    assert rest == b""
    assert head.count(b"\r\n") == len(asked.headers)
    assert head.count(b"\n") == head.count(b"\r") == head.count(b"\r\n")
    assert b"\0" not in head


@given(
    st.sampled_from(["GET", "POST", "CONNECT", "OPTIONS", "TRACE", "get", "G T"]),
    st.sampled_from(TARGETS),
    st.sampled_from(["HTTP/1.1", "HTTP/1.0", "HTTP/2.0", ""]),
    st.lists(st.sampled_from(LINES), max_size=5),
    st.sampled_from([None, TLS_AUTHORITY]),
)
def test_any_mixture(
    method: str, target: str, version: str, lines: list[str], tls_authority: RequestTarget | None
) -> None:
    head = "\r\n".join([f"{method} {target} {version}", *lines, "", ""]).encode()
    asked = read(head, tls_authority)
    if asked is not None:
        check(asked)
        if tls_authority is not None:
            assert asked.authority == tls_authority
        assert asked.authority.name in ("data.test", "other.test")
        if any(line.lower().startswith("host:") for line in lines):
            assert f"host:{asked.authority.name}" in head.decode().lower().replace(" ", "")


@given(st.binary(max_size=200))
@example(b"GET http://data.test/ HTTP/1.1\r\nHost: data.test\r\n\r\n")
def test_any_bytes(data: bytes) -> None:
    for head in (
        data + b"\r\n\r\n",
        b"GET http://data.test/ HTTP/1.1\r\nHost: data.test\r\n" + data + b"\r\n\r\n",
    ):
        if head.index(b"\r\n\r\n") == len(head) - 4:
            asked = read(head, None)
            if asked is not None:
                check(asked)


def test_hop_by_hop_headers_of_a_response() -> None:
    response = h11.Response(
        status_code=200,
        headers=[("Connection", "x-hop"), ("X-Hop", "1"), ("X-End", "2"), ("Transfer-Encoding", "chunked")],
    )
    assert response_headers(response) == [(b"X-End", b"2")]


def test_an_answer_of_our_own() -> None:
    with pytest.raises(ProxyRefusal) as caught:
        raise bad_request("x")
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "a")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(caught.value.encode_response())
    response = connection.next_event()
    assert isinstance(response, h11.Response)
    assert response.status_code == 400
