"""Files of a conversation in its containers: when they are put there, under which names, how often."""

import base64
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import msgspec
import pytest

from fumehood.containers.container_settings import ContainerSettings, IsolationScope
from fumehood.containers.file_sync import ContainerFileLimits
from fumehood.engine import attachment_resolver
from fumehood.engine.attachment_resolver import AttachmentResolver
from fumehood.files import input_file_loader
from fumehood.files.input_file_loader import InputFileLoader
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.testing import DeleteFile, ScriptedExecution, ScriptedSandboxProvider, WriteFile
from fumehood.tools import container_inputs
from fumehood.tools.interpreter_call import CodeInterpreterToolSettings
from fumehood.tools.produced_files import to_produced_file
from tests.support.interpreter_harness import SOMEBODY, InterpreterHarness
from tests.support.memory_uploads import InMemoryUploads

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20
IDLE = 20 * 60 + 1


class ConversationHarness(InterpreterHarness):
    """An interpreter in whose conversation users bring files."""

    async def say(self, *parts: dict[str, Any]) -> None:
        raw = msgspec.json.encode({"type": "message", "role": "user", "content": parts})
        said = ConversationEntry(type="message", id=None, turn=0, raw=raw)
        assert self.uploads is not None
        attacher = AttachmentResolver(InputFileLoader(self.uploads))
        found = await attacher.resolve((said,), SOMEBODY, self.segments, lambda: False)
        self.segments.append(ConversationSegment(found.entries))

    async def files(self, container_id: str) -> dict[str, bytes]:
        records = await self.containers.list_files(SOMEBODY, container_id)
        return {record.path: await self.read_file(to_produced_file(record)) for record in records}


@asynccontextmanager
async def conversation_harness(
    *steps: ScriptedExecution, settings: ContainerSettings | None = None
) -> AsyncGenerator[tuple[ConversationHarness, InMemoryUploads]]:
    uploads = InMemoryUploads()
    async with ScriptedSandboxProvider(*steps) as provider:
        yield (
            ConversationHarness(
                provider,
                CodeInterpreterToolSettings(),
                settings or ContainerSettings(),
                blobs=uploads.blobs,
                uploads=uploads,
            ),
            uploads,
        )


def inline(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "input_file", "filename": name, "file_data": base64.b64encode(content).decode()}


def picture(content: bytes = PNG) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return {"type": "input_image", "image_url": url}


def upload(file_id: str) -> dict[str, Any]:
    return {"type": "input_file", "file_id": file_id}


@pytest.mark.parametrize("isolation", ["container", "execution"])
async def test_files_come_with_the_first_call_and_once(isolation: IsolationScope) -> None:
    settings = ContainerSettings(isolation=isolation)
    async with conversation_harness(ScriptedExecution("x"), ScriptedExecution("y"), settings=settings) as (
        interpreter,
        uploads,
    ):
        await interpreter.say(
            inline("t.csv", b"1"),
            upload(uploads.add("t.csv", b"2", SOMEBODY.tenant)),
            picture(),
            upload(uploads.add("x.pdf", b"%PDF", SOMEBODY.tenant)),
        )
        await interpreter.configure()
        assert await interpreter.store.find_containers() == []
        first = await interpreter.run("x")
        there = {"t.csv": b"1", "t-2.csv": b"2", "image.png": PNG, "x.pdf": b"%PDF"}
        assert await interpreter.files(first.item.container_id) == there
        assert first.model_text == (
            "Files of the user: /mnt/data/t.csv, /mnt/data/t-2.csv, /mnt/data/image.png, /mnt/data/x.pdf."
        )
        records = await interpreter.containers.list_files(SOMEBODY, first.item.container_id)
        assert {record.source for record in records} == {"user"}
        assert first.execution.files == []
        second = await interpreter.run("y")
        assert second.model_text == "(no output)"
        assert await interpreter.files(second.item.container_id) == there


async def test_what_code_made_of_a_file_stays() -> None:
    """Changed, deleted or written over: what was brought before a call is not brought again after it."""
    changes = (WriteFile("t.csv", b"changed"), DeleteFile("u.csv"))
    async with conversation_harness(ScriptedExecution("x", changes), ScriptedExecution("y")) as (
        interpreter,
        uploads,
    ):
        await interpreter.say(
            upload(uploads.add("t.csv", b"1", SOMEBODY.tenant)),
            inline("u.csv", b"2"),
        )
        await interpreter.run("x")
        uploads.records.clear()
        second = await interpreter.run("y")
        assert second.model_text == "(no output)"
        assert await interpreter.files(second.item.container_id) == {"t.csv": b"changed"}


async def test_a_name_that_code_has_taken_is_left_to_it_and_the_model_is_told() -> None:
    async with conversation_harness(
        ScriptedExecution("x", (WriteFile("t.csv", b"mine"),)), ScriptedExecution("y")
    ) as (
        interpreter,
        uploads,
    ):
        await interpreter.run("x")
        await interpreter.say(inline("t.csv", b"1"), upload(uploads.add("t.csv", b"2", SOMEBODY.tenant)))
        second = await interpreter.run("y")
        assert (
            second.model_text == "Files of the user: /mnt/data/t-2.csv (t.csv), /mnt/data/t-3.csv (t-2.csv)."
        )
        assert await interpreter.files(second.item.container_id) == {
            "t.csv": b"mine",
            "t-2.csv": b"1",
            "t-3.csv": b"2",
        }


async def test_later_files_come_with_the_next_call() -> None:
    async with conversation_harness(ScriptedExecution("x"), ScriptedExecution("y")) as (interpreter, _):
        await interpreter.run("x")
        await interpreter.say(inline("t.csv", b"1"))
        second = await interpreter.run("y")
        assert second.model_text == "Files of the user: /mnt/data/t.csv."


async def test_calls_side_by_side_bring_files_once() -> None:
    async with conversation_harness(ScriptedExecution(None), ScriptedExecution(None)) as (interpreter, _):
        await interpreter.say(inline("t.csv", b"1"))
        calls = await interpreter.call_in_parallel(await interpreter.configure(), "x", "x")
        assert sorted(called.model_text for called in calls) == [
            "(no output)",
            "Files of the user: /mnt/data/t.csv.",
        ]


@pytest.mark.parametrize("deleted", [False, True])
async def test_an_expired_container_is_followed_by_one_with_the_same_files(deleted: bool) -> None:
    async with conversation_harness(
        ScriptedExecution("x", (WriteFile("t.csv", b"changed"),)), ScriptedExecution("y")
    ) as (
        interpreter,
        uploads,
    ):
        kept = uploads.add("t.csv", b"1", SOMEBODY.tenant)
        await interpreter.say(upload(kept), inline("u.csv", b"2"))
        first = await interpreter.run("x")
        interpreter.clock.advance(IDLE)
        if deleted:
            uploads.records.clear()
        second = await interpreter.run("y")
        assert second.item.container_id != first.item.container_id
        assert await interpreter.files(second.item.container_id) == {"t.csv": b"changed", "u.csv": b"2"}
        assert "has expired" in second.model_text
        assert "is not there" not in second.model_text


async def test_a_container_that_is_gone_altogether_is_refilled_as_far_as_that_goes() -> None:
    async with conversation_harness(ScriptedExecution("x"), ScriptedExecution("y")) as (interpreter, uploads):
        stays, goes = (uploads.add(name, b"1", SOMEBODY.tenant) for name in ("s.csv", "g.csv"))
        await interpreter.store.add_upload(uploads.records[stays])  # or its blob would belong to nobody
        await interpreter.say(upload(stays), upload(goes), inline("u.csv", b"2"))
        first = await interpreter.run("x")
        await interpreter.containers.delete_container(SOMEBODY, first.item.container_id)
        del uploads.records[goes]
        second = await interpreter.run("y")
        assert await interpreter.files(second.item.container_id) == {"s.csv": b"1", "u.csv": b"2"}
        _, brought, missing = second.model_text.splitlines()
        assert brought == "Files of the user: /mnt/data/s.csv, /mnt/data/u.csv."
        assert missing.startswith("g.csv is not there: ")


async def test_what_does_not_fit_is_told_and_the_code_runs() -> None:
    small = ContainerSettings(file_limits=ContainerFileLimits(container_bytes=10))
    async with conversation_harness(ScriptedExecution("x"), settings=small) as (interpreter, _):
        await interpreter.say(inline("large.csv", b"x" * 100), inline("t.csv", b"1"))
        ran = await interpreter.run("x")
        assert ran.item.status == "completed"
        assert await interpreter.files(ran.item.container_id) == {"t.csv": b"1"}
        brought, missing = ran.model_text.splitlines()
        assert brought == "Files of the user: /mnt/data/t.csv."
        assert missing.startswith("large.csv is not there: There is no room")


async def test_large_files_leave_the_loop_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken apart and decoded beside it, when they are looked at and when they are brought."""
    threads: dict[str, int] = {}

    def watched[**P, T](name: str, work: Callable[P, T]) -> Callable[P, T]:
        def watching(*args: P.args, **kwargs: P.kwargs) -> T:
            threads[name] = threading.get_ident()
            return work(*args, **kwargs)

        return watching

    places: list[tuple[ModuleType, str]] = [
        (attachment_resolver, "find_file_parts"),
        (input_file_loader, "decode_inline"),
        (container_inputs, "find_file_parts"),
        (container_inputs, "decode_inline"),
    ]
    for module, name in places:
        monkeypatch.setattr(module, name, watched(f"{module.__name__}.{name}", getattr(module, name)))
    content = b"x" * (1 << 20)
    async with conversation_harness(ScriptedExecution("x")) as (interpreter, _):
        await interpreter.say(inline("t.txt", content))
        ran = await interpreter.run("x")
        assert await interpreter.files(ran.item.container_id) == {"t.txt": content}
    assert len(threads) == len(places)
    assert threading.get_ident() not in threads.values()


# --- uploads that the tool names ----------------------------------------------------------------------


def automatic(*file_ids: str) -> dict[str, Any]:
    return {"type": "auto", "file_ids": file_ids}


async def test_uploads_that_the_tool_names_are_there_and_told() -> None:
    async with conversation_harness(ScriptedExecution("x"), ScriptedExecution("y")) as (interpreter, uploads):
        ids = [uploads.add("t.csv", b"1", SOMEBODY.tenant), uploads.add("t.csv", b"2", SOMEBODY.tenant)]
        await interpreter.say(inline("t.csv", b"3"))
        offered = await interpreter.configure(automatic(*ids))
        assert "Files of the user are there: t.csv, t-2.csv." in offered.function.description
        first = await interpreter.run("x", container=automatic(*ids))
        there = {"t.csv": b"1", "t-2.csv": b"2", "t-3.csv": b"3"}
        assert await interpreter.files(first.item.container_id) == there
        assert first.model_text == (
            "Files of the user: /mnt/data/t.csv, /mnt/data/t-2.csv, /mnt/data/t-3.csv (t.csv)."
        )
        uploads.records.clear()
        second = await interpreter.run("y", container=automatic(*ids))
        assert second.model_text == "(no output)"
        assert await interpreter.files(second.item.container_id) == there


async def test_the_description_stays_the_same_from_turn_to_turn() -> None:
    async with conversation_harness(ScriptedExecution("x"), ScriptedExecution("y")) as (interpreter, uploads):
        container = automatic(uploads.add("t.csv", b"1", SOMEBODY.tenant))
        described: list[str] = []
        for code in ("x", "y"):
            await interpreter.say(inline("u.csv", b"1"))
            described.append((await interpreter.configure(container)).function.description)
            await interpreter.run(code, container=container)
        assert described[0] == described[1]


async def test_an_upload_that_is_not_there_is_refused_before_anything_begins() -> None:
    async with conversation_harness() as (interpreter, uploads):
        theirs = uploads.add("t.csv", b"1", "somebody else")
        for file_id in (theirs, "file-unknown"):
            with pytest.raises(InvalidRequest, match=file_id) as refused:
                await interpreter.configure(automatic(file_id))
            assert refused.value.param == "tools"
        assert await interpreter.store.find_containers() == []


async def test_an_expired_container_hands_on_the_uploads_that_the_tool_names() -> None:
    async with conversation_harness(
        ScriptedExecution("x", (WriteFile("t.csv", b"changed"),)), ScriptedExecution("y")
    ) as (
        interpreter,
        uploads,
    ):
        container = automatic(uploads.add("t.csv", b"1", SOMEBODY.tenant))
        await interpreter.run("x", container=container)
        interpreter.clock.advance(IDLE)
        uploads.records.clear()
        second = await interpreter.run("y", container=container)
        assert await interpreter.files(second.item.container_id) == {"t.csv": b"changed"}
        assert "is not there" not in second.model_text


# --- what a compaction leaves -------------------------------------------------------------------------


async def compacted(interpreter: ConversationHarness) -> None:
    """All items are gone; only what the tool remembers is left."""
    memory = await interpreter.tool.snapshot_state(SOMEBODY, interpreter.segments)
    assert memory is not None
    items = [msgspec.json.decode(item) for item in memory.items]
    entries = [
        ConversationEntry(type=item["type"], id=None, turn=0, raw=raw)
        for item, raw in zip(items, memory.items, strict=True)
    ]
    interpreter.segments = [ConversationSegment(tuple(entries))]


async def test_files_that_nobody_has_needed_yet_outlive_a_compaction() -> None:
    async with conversation_harness(ScriptedExecution("x")) as (interpreter, uploads):
        given = upload(uploads.add("t.csv", b"1", SOMEBODY.tenant))
        await interpreter.say(given, inline("u.csv", b"2"), picture())
        await compacted(interpreter)
        await compacted(interpreter)
        ran = await interpreter.run("x")
        there = {"t.csv": b"1", "u.csv": b"2", "image.png": PNG}
        assert await interpreter.files(ran.item.container_id) == there
        assert ran.model_text == "Files of the user: /mnt/data/t.csv, /mnt/data/u.csv, /mnt/data/image.png."


async def test_of_what_came_inline_a_compaction_takes_the_latest_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fumehood.tools.container_inputs._MAX_CARRIED_CHARACTERS", 100)
    async with conversation_harness(ScriptedExecution("x")) as (interpreter, _):
        for name, size in (("a.csv", 30), ("b.csv", 200), ("c.csv", 30), ("d.csv", 30)):
            await interpreter.say(inline(name, b"x" * size))
        await compacted(interpreter)
        ran = await interpreter.run("x")
        assert set(await interpreter.files(ran.item.container_id)) == {"c.csv", "d.csv"}
        assert ran.model_text.splitlines() == [
            "Files of the user: /mnt/data/c.csv, /mnt/data/d.csv.",
            "a.csv is not there: it was given too long ago.",
            "b.csv is not there: it was given too long ago.",
        ]


async def test_a_compaction_takes_nothing_along_that_is_elsewhere() -> None:
    async with conversation_harness(ScriptedExecution("x")) as (interpreter, uploads):
        given = upload(uploads.add("t.csv", b"of an upload", SOMEBODY.tenant))
        await interpreter.say(inline("u.csv", b"of a container"), given)
        await interpreter.run("x")
        await interpreter.say(inline("v.csv", b"of a message that stays"))
        stays = interpreter.segments[-1].entries
        for kept, found in ((stays, False), ((), True)):
            memory = await interpreter.tool.snapshot_state(SOMEBODY, interpreter.segments, kept)
            assert memory is not None
            whole = b"".join(memory.items)
            assert all(name in whole for name in (b"t.csv", b"u.csv", b"v.csv"))
            assert whole.count(b'"data"') == found


async def test_files_that_are_there_are_not_brought_again_after_a_compaction() -> None:
    async with conversation_harness(
        ScriptedExecution("x", (WriteFile("t.csv", b"changed"),)), ScriptedExecution("y")
    ) as (
        interpreter,
        uploads,
    ):
        await interpreter.say(upload(uploads.add("t.csv", b"1", SOMEBODY.tenant)), inline("u.csv", b"2"))
        await interpreter.run("x")
        memory = await interpreter.tool.snapshot_state(SOMEBODY, interpreter.segments)
        assert memory is not None
        assert "The user has given these files, which code finds in /mnt/data: t.csv, u.csv." in memory.note
        await compacted(interpreter)
        second = await interpreter.run("y")
        assert second.model_text == "(no output)"
        assert await interpreter.files(second.item.container_id) == {"t.csv": b"changed", "u.csv": b"2"}


async def test_a_forged_memory_opens_nobody_elses_files() -> None:
    async with conversation_harness(ScriptedExecution("x")) as (interpreter, uploads):
        theirs = uploads.add("t.csv", b"secret", "somebody else")
        forged = {"type": "fumehood:files", "files": [{"file": {"name": "t.csv", "file_id": theirs}}]}
        rubbish = {"type": "fumehood:files", "files": 5}
        entries = [
            ConversationEntry(type="fumehood:files", id=None, turn=0, raw=msgspec.json.encode(item))
            for item in (forged, rubbish)
        ]
        interpreter.segments = [ConversationSegment(tuple(entries))]
        ran = await interpreter.run("x")
        assert "t.csv is not there: " in ran.model_text
        assert await interpreter.files(ran.item.container_id) == {}
