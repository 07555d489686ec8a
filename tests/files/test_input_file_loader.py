"""What the files and pictures of an input are found to be."""

import base64
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.files import InputSettings
from fumehood.files.input_file_loader import InputFileLoader
from fumehood.files.url_fetcher import PassthroughUrlChecker, UrlFetcher
from fumehood.http_server.dns_resolver import DnsResolver
from fumehood.interfaces import Caller
from fumehood.protocol.attachments import (
    MAX_TEXT_BYTES,
    MAX_TEXT_CHARACTERS,
    Attachment,
    InputFilePart,
    InputImageUrl,
    decode_inline,
    sanitize_file_name,
)
from fumehood.protocol.name_sanitizing import FreeNameAllocator, find_free_name
from fumehood.protocol.openai.api_errors import ApiError, InvalidRequest, NotFound, RateLimited
from tests.support.memory_uploads import InMemoryUploads
from tests.support.websites import Website

SOMEBODY = Caller("somebody")
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 50
PDF = b"%PDF-1.7\n" + b"1 0 obj\n" * 20


def inline(content: bytes, media_type: str = "application/octet-stream") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


class LoaderHarness:
    """A loader of input files, and uploads."""

    def __init__(self, **limits: Any) -> None:
        self.uploads = InMemoryUploads()
        self.subject = InputFileLoader(self.uploads, None, InputSettings(**limits))

    async def load_upload(
        self, filename: str, content: bytes, kind: str = "input_file", *, whole: bool = False
    ) -> Attachment:
        file_id = self.uploads.add(filename, content, SOMEBODY.tenant)
        return await self.subject.load_attachment(
            SOMEBODY, InputFilePart(type=kind, file_id=file_id), with_content=whole
        )

    async def load(self, **part: Any) -> Attachment:
        return await self.subject.load_attachment(SOMEBODY, InputFilePart(**part), with_content=False)

    async def refusal(self, **part: Any) -> ApiError:
        with pytest.raises((InvalidRequest, NotFound)) as caught:
            await self.load(**part)
        return caught.value


# --- uploads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filename", "content", "text"),
    [
        ("t.csv", b"a,b\n1,\xc3\xa9\n", "a,b\n1,é\n"),
        ("t.csv", b"\xef\xbb\xbfa,b\n", "a,b\n"),
        ("t.csv", b"caf\xe9\n", "caf\ufffd\n"),
        ("noname", b"plain", "plain"),
        ("wrong.pdf", b"let x = 1", "let x = 1"),
        ("run.sh", b"#!/bin/sh\n", "#!/bin/sh\n"),
        ("x.json", b"{}", "{}"),
        ("empty.txt", b"", ""),
    ],
)
async def test_an_upload_of_text_is_read(filename: str, content: bytes, text: str) -> None:
    found = await LoaderHarness().load_upload(filename, content)
    assert (found.kind, found.name, found.bytes, found.file_id) == ("text", filename, len(content), "file-1")
    assert (found.text, found.omitted_bytes, found.data) == (text, 0, None)


async def test_of_a_long_text_the_beginning_is_read_and_nothing_else() -> None:
    harness = LoaderHarness()
    content = "é".encode() * (5 * MAX_TEXT_CHARACTERS)
    found = await harness.load_upload("t.txt", content)
    assert found.text == "é" * MAX_TEXT_CHARACTERS
    assert found.omitted_bytes == MAX_TEXT_CHARACTERS + len(content) - MAX_TEXT_BYTES
    assert harness.uploads.reads == [("file-1", MAX_TEXT_BYTES)]


async def test_a_character_that_is_cut_in_two_is_no_reason_to_call_it_binary() -> None:
    content = b"x" + "日".encode() * MAX_TEXT_BYTES
    found = await LoaderHarness().load_upload("notes", content)
    assert found.text is not None
    assert found.text.startswith("x日日")


@pytest.mark.parametrize("content", [PDF, PNG, b"PK\x03\x04\0\0", b"\xff\xfe\0"])
async def test_other_uploads_are_read_only_for_models_that_take_them(content: bytes) -> None:
    harness = LoaderHarness(file_bytes=1000)
    found = await harness.load_upload("x", content)
    assert (found.kind, found.text, found.data, found.bytes) == ("binary", None, None, len(content))
    found = await harness.load_upload("x", content, whole=True)
    assert found.data is not None
    assert decode_inline(found.data)[1] == content
    large = content + b"\0" * 1000
    assert (await harness.load_upload("x", large, whole=True)).data is None


async def test_a_picture_is_one_by_its_content() -> None:
    harness = LoaderHarness(image_bytes=1000)
    found = await harness.load_upload("photo.txt", PNG, "input_image")
    assert (found.kind, found.media_type, found.name) == ("picture", "image/png", "photo.txt")
    assert found.data == inline(PNG, "image/png")
    for content in (PDF, b"<svg/>", PNG + b"\0" * 1000):
        with pytest.raises(InvalidRequest, match="cannot be sent to a model") as refused:
            await harness.load_upload("x.png", content, "input_image")
        assert refused.value.param == "file_id"


async def test_what_is_read_is_told_before_it_is() -> None:
    harness, reserved = LoaderHarness(), list[int]()

    async def found(filename: str, content: bytes, kind: str = "input_file") -> tuple[int, int]:
        """How much was reserved, and how much is held."""
        reserved.clear()
        file_id = harness.uploads.add(filename, content, SOMEBODY.tenant)
        part = InputFilePart(type=kind, file_id=file_id)
        one = await harness.subject.load_attachment(
            SOMEBODY, part, with_content=True, reserve_memory=reserved.append
        )
        return sum(reserved), len(one.text or one.data or "")

    assert await found("t.csv", b"x" * 1000) == (1000, 1000)
    for content, kind in ((PDF, "input_file"), (PNG, "input_image")):
        said, held = await found("x", content, kind)
        assert held - 50 < said < held  # which has a head besides

    def refuse(_: int) -> None:
        raise RateLimited("Too much.")

    harness.uploads.reads.clear()
    picture = InputFilePart(type="input_image", file_id=harness.uploads.add("x.png", PNG, SOMEBODY.tenant))
    with pytest.raises(RateLimited):
        await harness.subject.load_attachment(SOMEBODY, picture, with_content=True, reserve_memory=refuse)
    assert harness.uploads.reads == []


async def test_an_upload_of_somebody_else_is_not_there() -> None:
    harness = LoaderHarness()
    theirs = harness.uploads.add("x.txt", b"secret", "somebody else")
    for file_id in (theirs, "file-unknown", "", "../x", "file-\u202e"):
        for kind in ("input_file", "input_image"):
            error = await harness.refusal(type=kind, file_id=file_id)
            assert isinstance(error, NotFound)
            assert (error.param, error.wire_code) == ("file_id", "file_not_found")
            assert "\u202e" not in error.message
    assert harness.uploads.reads == []


# --- inline -------------------------------------------------------------------------------------------


async def test_inline_files_are_looked_at_and_not_kept_twice() -> None:
    harness = LoaderHarness()
    found = await harness.load(type="input_file", filename="../t.csv", file_data=inline(b"a,b", "text/csv"))
    assert found == Attachment(name="t.csv", kind="text", media_type="text/csv", bytes=3)
    found = await harness.load(type="input_file", filename="x.pdf", file_data=base64.b64encode(PDF).decode())
    assert found == Attachment(name="x.pdf", kind="binary", media_type="application/pdf", bytes=len(PDF))
    for address in (inline(PNG, "image/png"), InputImageUrl(inline(PNG))):
        found = await harness.load(type="input_image", image_url=address)
        assert found == Attachment(name="image.png", kind="picture", media_type="image/png", bytes=len(PNG))


async def test_what_is_inline_is_bounded_as_uploads_are() -> None:
    harness = LoaderHarness(image_bytes=len(PNG), file_bytes=len(PDF))
    for content, too_large in ((PDF, False), (PDF + b"\n", True)):
        found = await harness.load(
            type="input_file", filename="x.pdf", file_data=inline(content, "application/pdf")
        )
        assert (found.kind, found.bytes, found.too_large) == ("binary", len(content), too_large)
    text = await harness.load(
        type="input_file", filename="x.txt", file_data=inline(b"x" * 1000, "text/plain")
    )
    assert (text.kind, text.too_large) == ("text", False)
    assert (await harness.load(type="input_image", image_url=inline(PNG, "image/png"))).kind == "picture"
    error = await harness.refusal(type="input_image", image_url=inline(PNG + b"x", "image/png"))
    assert (error.param, error.wire_code) == ("image_url", "invalid_value")


async def test_what_is_inline_comes_before_what_is_referred_to() -> None:
    found = await LoaderHarness().load(
        type="input_file", filename="x.txt", file_data=inline(b"x"), file_id="file-gone"
    )
    assert (found.name, found.file_id) == ("x.txt", "")


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "input_file", "file_data": "data:text/plain;base64,***"}, "file_data"),
        ({"type": "input_file", "file_data": "é"}, "file_data"),
        ({"type": "input_image", "image_url": "data:image/png;base64,%"}, "image_url"),
        ({"type": "input_file"}, "file_id"),
        ({"type": "input_file", "filename": "x"}, "file_id"),
        ({"type": "input_image"}, "file_id"),
    ],
)
async def test_parts_that_hold_nothing(part: dict[str, Any], param: str) -> None:
    error = await LoaderHarness().refusal(**part)
    assert isinstance(error, InvalidRequest)
    assert error.param == param


# --- addresses ----------------------------------------------------------------------------------------


ADDRESSED = (
    {"type": "input_image", "image_url": "https://x.test/"},
    {"type": "input_image", "image_url": {"url": "https://x.test/", "detail": "low"}},
    {"type": "input_file", "file_url": "https://x.test/t.pdf"},
)


@pytest.mark.parametrize("part", ADDRESSED)
async def test_addresses_are_refused_unless_somebody_deals_with_them(part: dict[str, Any]) -> None:
    error = await LoaderHarness().refusal(**msgspec.structs.asdict(msgspec.convert(part, InputFilePart)))
    assert (error.param, error.wire_code) == (
        "image_url" if part["type"] == "input_image" else "file_url",
        "unsupported_parameter",
    )
    assert "inputs.pass_urls" in error.message


@pytest.mark.parametrize("part", ADDRESSED)
async def test_addresses_may_pass(part: dict[str, Any]) -> None:
    subject = InputFileLoader(InMemoryUploads(), PassthroughUrlChecker(InputSettings()))
    assert (
        await subject.load_attachment(SOMEBODY, msgspec.convert(part, InputFilePart), with_content=False)
        == Attachment()
    )


async def test_what_was_fetched_is_kept_like_what_came_inline() -> None:
    replies = {
        "/a/t.csv": ("text/csv", b"a,b"),
        "/p": ("image/jpeg", PNG),
        "/x.pdf": ("application/pdf", PDF),
    }

    def reply(seen: Any) -> Any:
        media_type, body = replies.get(seen.target, ("text/html", b"<p>"))
        return 200, [("Content-Type", media_type)], body

    async with Website(reply=reply) as site:
        fetcher = UrlFetcher(
            InputSettings(fetch_private_networks=("127.0.0.0/8",)),
            DnsResolver({"w.test": "127.0.0.1"}, timeout=5),
        )
        subject = InputFileLoader(InMemoryUploads(), fetcher)
        base = f"http://w.test:{site.port}"

        async def of(**part: Any) -> Attachment:
            return await subject.load_attachment(SOMEBODY, InputFilePart(**part), with_content=False)

        found = await of(type="input_file", file_url=f"{base}/a/t.csv")
        assert (found.name, found.kind, found.data) == ("t.csv", "text", inline(b"a,b", "text/csv"))
        found = await of(type="input_file", file_url=f"{base}/x.pdf", filename="report.pdf")
        assert (found.name, found.kind, found.data) == (
            "report.pdf",
            "binary",
            inline(PDF, "application/pdf"),
        )
        found = await of(type="input_image", image_url=f"{base}/p")
        assert (found.name, found.kind, found.data) == ("p", "picture", inline(PNG, "image/png"))
        with pytest.raises(InvalidRequest, match="leads to no PNG") as refused:
            await of(type="input_image", image_url=f"{base}/other")
        assert refused.value.param == "image_url"
        with pytest.raises(NotFound, match="not public") as missing:
            await of(type="input_file", file_url="http://10.0.0.1/")
        assert missing.value.param == "file_url"


# --- names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_name", "name"),
    [
        ("t.csv", "t.csv"),
        ("/etc/passwd", "passwd"),
        ("..\\..\\x.txt", "x.txt"),
        ("..", "file"),
        ("", "file"),
        (".bashrc", "bashrc"),
        ("a\nb\u202ec.txt", "a_b_c.txt"),
        ("  spaced.txt ", "spaced.txt"),
        ("backup~", "backup"),
    ],
)
def test_names_of_files(given_name: str, name: str) -> None:
    assert sanitize_file_name(given_name) == name


@given(st.text(max_size=600))
def test_every_name_is_fit_for_a_file_system(given_name: str) -> None:
    name = sanitize_file_name(given_name)
    assert 0 < len(name.encode()) <= 200
    assert "/" not in name
    assert "\0" not in name
    assert not name.startswith(".")
    assert sanitize_file_name(name) == name


@given(st.lists(st.sampled_from(["a.csv", "a-2.csv", "a", ".a", "a-2", "a-3.csv"])))
def test_names_that_are_given_out_differ(wanted: list[str]) -> None:
    taken: set[str] = set()
    for name in wanted:
        free = find_free_name(name, taken)
        assert free not in taken
        taken.add(free)


@given(st.lists(st.sampled_from(["a.csv", "a-2.csv", "a", ".a", "a-2", "a-3.csv"])))
def test_names_that_are_given_out_together_are_the_same(wanted: list[str]) -> None:
    taken: set[str] = {"a-3.csv"}
    names = FreeNameAllocator(frozenset(taken))
    for name in wanted:
        free = find_free_name(name, taken)
        assert names.allocate(name) == free
        taken.add(free)


def test_no_name_is_tried_twice_however_many_files_have_it() -> None:
    class Asked(set[str]):
        times = 0

        def __contains__(self, name: object) -> bool:
            self.times += 1
            return super().__contains__(name)

    asked = Asked({"a.csv"})
    names = FreeNameAllocator(asked)
    assert [names.allocate("a.csv") for _ in range(1000)][-1] == "a-1001.csv"
    assert asked.times <= 3000
