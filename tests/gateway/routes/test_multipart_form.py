"""Multipart forms in any chunks, and invalid ones."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fumehood.gateway.gateway_exchange import GatewayExchange
from fumehood.gateway.routes.multipart_form import MAX_OVERHEAD_BYTES, MultipartForm
from fumehood.http_server.asgi_exchange import ClientDisconnected
from fumehood.protocol.openai.api_errors import ApiError, BodyTooLarge, InvalidRequest
from tests.support.multipart_bodies import BOUNDARY, form, form_type, part

type Outcome = tuple[str | None, bytes, dict[str, str]]

SIMPLE = form([part("purpose", b"user_data"), part("file", b"con\r\n--b0und\r\ntent", "a.txt")])
LAST = form([part("file", b"content", "a.txt"), part("purpose", b"batch")])


def make_context(
    pieces: Sequence[bytes], headers: dict[str, str] | None = None, *, leaves: bool = False
) -> GatewayExchange:
    """A request whose body comes in these pieces; or breaks off after them, if the client leaves."""
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": piece, "more_body": leaves or number < len(pieces) - 1}
        for number, piece in enumerate(pieces)
    ]
    coming = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(coming, {"type": "http.disconnect"})

    async def send(_: Any) -> None: ...

    all_headers = {"transfer-encoding": "chunked", **(headers or form_type())}
    scope = {
        "method": "POST",
        "path": "/v1/files",
        "query_string": b"",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in all_headers.items()],
    }
    return GatewayExchange(scope, receive, send)


async def _read(exchange: GatewayExchange, file_bytes: int) -> Outcome:
    read = MultipartForm(exchange, file_bytes)
    await read.read_to_file()
    content = b"".join([piece async for piece in read.iter_file()])
    return read.filename, content, read.fields


def read_form(
    *pieces: bytes, headers: dict[str, str] | None = None, file_bytes: int = 1 << 20, leaves: bool = False
) -> Outcome:
    return asyncio.run(_read(make_context(pieces, headers, leaves=leaves), file_bytes))


def rejection(*pieces: bytes, **options: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        read_form(*pieces, **options)
    return refused.value


def cut(body: bytes, places: Sequence[int]) -> list[bytes]:
    marks = sorted({0, len(body), *(place % (len(body) + 1) for place in places)})
    return [body[start:end] for start, end in itertools.pairwise(marks)]


# --- what is well formed ------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [SIMPLE, LAST], ids=["file last", "file first"])
def test_a_form_may_be_cut_anywhere(body: bytes) -> None:
    whole = read_form(body)
    assert whole[0] == "a.txt"
    assert set(whole[2]) == {"purpose"}
    for place in range(1, len(body)):
        assert read_form(body[:place], body[place:]) == whole
    assert read_form(*(body[place : place + 1] for place in range(len(body)))) == whole


CONTENT = st.one_of(
    st.binary(max_size=300),
    st.lists(
        st.sampled_from([b"\r", b"\n", b"-", b"--", b"\r\n--", b"\r\n--b0undar", b"b0undary", b"\0", b"x"])
    ).map(b"".join),
).filter(lambda content: b"--" + BOUNDARY not in content)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters='"\\\r\n'), max_size=40)


@settings(max_examples=150, deadline=None)
@given(
    content=CONTENT,
    filename=NAMES,
    fields=st.dictionaries(
        st.text("abcxyz[]", min_size=1, max_size=8).filter(lambda name: name != "file"), NAMES
    ),
    before=st.integers(0, 5),
    places=st.lists(st.integers(0, 5000), max_size=12),
    epilogue=st.sampled_from([b"", b"\r\n", b"whatever"]),
)
def test_any_form(
    content: bytes, filename: str, fields: dict[str, str], before: int, places: list[int], epilogue: bytes
) -> None:
    parts = [part(name, value.encode()) for name, value in fields.items()]
    parts.insert(before, part("file", content, filename, b"Content-Type: text/plain"))
    found_name, found_content, found_fields = read_form(*cut(form(parts) + epilogue, places))
    assert (found_content, found_fields) == (content, fields)
    assert found_name is not None
    assert found_name.rpartition("/")[2] == filename.rpartition("/")[2]


def test_without_a_file() -> None:
    assert read_form(form([part("file", b"not a file"), part("a", b"")])) == (
        None,
        b"",
        {"file": "not a file", "a": ""},
    )
    assert read_form(b"--b0undary--\r\n") == (None, b"", {})


def test_line_ends_before_the_first_boundary() -> None:
    assert read_form(b"\r\n\r\n" + SIMPLE) == read_form(SIMPLE)


def test_a_boundary_in_quotes() -> None:
    body = form([part("file", b"x", "a.txt")], b"a b:c")
    assert read_form(body, headers={"content-type": 'Multipart/Form-Data; boundary="a b:c"'})[1] == b"x"


def test_a_form_within_a_form_is_content() -> None:
    inner = form([part("file", b"inner", "evil.txt"), part("purpose", b"evil")], b"inner")
    outer = form([part("file", inner, "a.txt", b"Content-Type: multipart/mixed; boundary=inner")])
    assert read_form(outer) == ("a.txt", inner, {})


# --- what is not --------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    place=st.integers(0, len(SIMPLE) - len("--\r\n") - 1), places=st.lists(st.integers(0, 500), max_size=5)
)
def test_a_form_that_breaks_off(place: int, places: list[int]) -> None:
    error = rejection(*cut(SIMPLE[:place], places), leaves=False) if place else rejection(b"")
    assert isinstance(error, InvalidRequest)


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=200),
    st.integers(0, len(SIMPLE)),
    st.integers(0, 60),
    st.lists(st.integers(0, 500), max_size=5),
)
def test_anything_at_all(noise: bytes, place: int, lost: int, places: list[int]) -> None:
    """What was damaged is read or refused, and nothing else happens."""
    body = SIMPLE[:place] + noise + SIMPLE[place + lost :]
    said = "read"
    try:
        read_form(*cut(body, places))
    except InvalidRequest as error:
        said = error.message
    assert said.isprintable()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (SIMPLE.replace(b"\r\n", b"\n"), None),
        (SIMPLE.replace(b"\r\n", b"\r"), None),
        (SIMPLE.replace(b"b0undary", b"another!"), None),
        (b"preamble\r\n" + SIMPLE, None),
        (b'{"purpose": "user_data"}', None),
        (form([b"\r\n\r\ncontent"]), None),
        (form([b"Content-Type: text/plain\r\n\r\nx"]), None),
        (form([b"Content-Disposition: attachment; name=file\r\n\r\nx"]), None),
        (form([b"Content-Disposition: form-data\r\n\r\nx"]), None),
        (form([b"A b: c\r\n\r\nx"]), None),
        (form([b"X: " + b"y" * 10_000 + b"\r\n\r\nx"]), None),
        (form([b"X" * 10_000 + b": y\r\n\r\nx"]), None),
        (form([b"\r\n".join(b"X%d: y" % number for number in range(20)) + b"\r\n\r\nx"]), None),
        (form([part(f"f{number}", b"") for number in range(65)]), None),
        (form([part("a", b"x" * 300_000)]), "a"),
        (form([part(f"f{number}", b"x" * 30_000) for number in range(10)]), "f8"),
        (form([part("a", b"1"), part("a", b"2")]), "a"),
        (form([part("a", b"\xff")]), "a"),
        (form([part("file", b"1", "a"), part("file", b"2", "b")]), "file"),
        (form([part("other", b"1", "a")]), "other"),
        (form([part("file", b"eA==", "a", b"Content-Transfer-Encoding: base64")]), None),
    ],
)  # fmt: skip
def test_what_is_refused(body: bytes, param: str | None) -> None:
    error = rejection(body)
    assert isinstance(error, InvalidRequest)
    assert error.param == param
    assert error.message.isprintable()


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/mixed; boundary=b0undary",
        "text/plain; multipart/form-data; boundary=b0undary",
        "multipart/form-data; boundary=" + "x" * 500,
    ],
)
def test_what_says_that_it_is_no_form(kind: str) -> None:
    assert isinstance(rejection(SIMPLE, headers={"content-type": kind}), InvalidRequest)


def test_more_than_was_to_come() -> None:
    body = form([part("file", b"x" * (MAX_OVERHEAD_BYTES + 100), "a.txt")])
    assert isinstance(rejection(body, file_bytes=10), BodyTooLarge)
    all_headers = {**form_type(), "content-length": str(MAX_OVERHEAD_BYTES + 11)}
    assert isinstance(rejection(b"", headers=all_headers, file_bytes=10), BodyTooLarge), (
        "before anything was read"
    )


def test_a_client_that_leaves() -> None:
    for place in (1, 60, len(SIMPLE) - 10):
        with pytest.raises(ClientDisconnected):
            read_form(SIMPLE[:place], leaves=True)


def test_names_are_what_they_are() -> None:
    """They are made fit to be read by whoever keeps them; here they do no harm."""
    for name in ("../../etc/passwd", "C:\\dir\\a.txt", "a;b.txt", "%00.txt", "a\tb.txt"):
        found, content, _ = read_form(form([part("file", b"x", name)]))
        assert found is not None
        assert (found.rpartition("\\")[2], content) == (name.rpartition("\\")[2], b"x")
    injected = b'Content-Disposition: form-data; name="file"; filename="a\nb.txt"\r\n\r\nx'
    assert read_form(form([injected]))[0] == "a\nb.txt"
    latin = b'Content-Disposition: form-data; name="file"; filename="\xe4.txt"\r\n\r\nx'
    assert read_form(form([latin]))[0] == "\ufffd.txt"
