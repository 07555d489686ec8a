"""Which container a call runs in, and items that clients give back."""

import msgspec
import pytest
from inline_snapshot import snapshot

from fumehood.containers.container_settings import ContainerSettings
from fumehood.interfaces import Caller
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment
from fumehood.protocol.openai.api_errors import ContainerExpired, NotFound
from fumehood.testing import ScriptedExecution, WriteFile
from tests.support.interpreter_harness import SOMEBODY, run_scripted


async def test_nothing_is_made_before_the_first_call() -> None:
    async with run_scripted() as interpreter:
        offered = await interpreter.configure({"type": "auto"})
        offered.start_call(interpreter.make_context()).open()
        assert await interpreter.store.find_containers() == []
        assert await interpreter.provider.list_sandboxes() == []
        assert not await offered.find_files(["/mnt/data/x"])


async def test_all_calls_of_a_request_have_one_container() -> None:
    async with run_scripted(ScriptedExecution("x"), ScriptedExecution("y")) as interpreter:
        calls = await interpreter.call_in_parallel(await interpreter.configure(), "x", "y")
        ids = {called.item.container_id for called in calls}
        assert len(ids) == 1
        assert [record.id for record in await interpreter.store.find_containers()] == list(ids)


async def test_the_next_request_goes_on_in_the_same_container() -> None:
    async with run_scripted(ScriptedExecution("x"), ScriptedExecution("y")) as interpreter:
        first, second = await interpreter.run("x"), await interpreter.run("y", container={"type": "auto"})
        assert first.item.container_id == second.item.container_id
        assert second.model_text == "(no output)"


async def test_a_container_that_expired_is_replaced_and_the_model_is_told_once() -> None:
    async with run_scripted(
        ScriptedExecution("x"), ScriptedExecution("y"), ScriptedExecution("z")
    ) as interpreter:
        first = await interpreter.run("x")
        interpreter.clock.advance(20 * 60 + 1)
        offered = await interpreter.configure()
        second, third = await interpreter.call(offered, "y"), await interpreter.call(offered, "z")
        assert second.model_text == snapshot(
            "The container of the earlier calls has expired, with their variables and the files that they wrote; "
            "this call began in a new one, with the files that the user had put there."
        )
        assert third.model_text == "(no output)"
        assert second.item.container_id != first.item.container_id


async def test_the_container_of_somebody_else_is_not_taken_over() -> None:
    async with run_scripted(ScriptedExecution("x"), ScriptedExecution("y")) as interpreter:
        first = await interpreter.run("x")
        stranger = Caller("stranger")
        second = await interpreter.call(await interpreter.configure(caller=stranger), "y", stranger)
        assert second.item.container_id != first.item.container_id
        assert "gone" in second.model_text


@pytest.mark.parametrize("shape", ["{id}", {"id": "{id}"}, {"id": "{id}", "memory_limit": "4g"}])
async def test_a_container_by_its_id(shape: object) -> None:
    async with run_scripted(ScriptedExecution("x"), ScriptedExecution("y")) as interpreter:
        first = await interpreter.run("x")
        interpreter.segments.clear()
        named = msgspec.json.decode(
            msgspec.json.encode(shape).replace(b"{id}", first.item.container_id.encode())
        )
        assert (await interpreter.run("y", container=named)).item.container_id == first.item.container_id


async def test_a_container_that_is_not_there() -> None:
    async with run_scripted(ScriptedExecution("x")) as interpreter:
        with pytest.raises(NotFound) as missing:
            await interpreter.run("y", container="cntr_nowhere")
        assert (missing.value.message, missing.value.param) == snapshot(
            ("Container with id 'cntr_nowhere' not found.", "tools")
        )
        named = (await interpreter.run("x")).item.container_id
        with pytest.raises(NotFound):
            await interpreter.configure(named, [], Caller("stranger"))
        interpreter.clock.advance(20 * 60)
        with pytest.raises(ContainerExpired) as expired:
            await interpreter.run("y", container=named)
        assert (expired.value.status, expired.value.message, expired.value.param) == snapshot(
            (400, "Container is expired.", "tools")
        )


@pytest.mark.parametrize("named", [False, True])
async def test_while_the_model_thinks_its_container_is_not_the_idle_one(named: bool) -> None:
    settings = ContainerSettings(containers_per_tenant=2)
    async with run_scripted(
        ScriptedExecution("x"),
        ScriptedExecution("other"),
        ScriptedExecution("new"),
        ScriptedExecution("y"),
        containers=settings,
    ) as interpreter:
        first = (await interpreter.run("x")).item.container_id
        conversation = [*interpreter.segments]
        interpreter.segments.clear()
        interpreter.clock.advance(19 * 60)
        await interpreter.run("other")
        interpreter.segments.clear()
        interpreter.clock.advance(1)
        offered = await interpreter.configure(first if named else None, conversation)
        interpreter.clock.advance(2 * 60)  # 21 minutes after the last call
        await interpreter.run("new")
        called = await interpreter.call(offered, "y")
        assert (called.item.container_id, called.item.status) == (first, "completed")


async def test_a_container_that_expires_while_the_model_writes() -> None:
    async with run_scripted(ScriptedExecution("x")) as interpreter:
        named = (await interpreter.run("x")).item.container_id
        offered = await interpreter.configure(named, [])
        interpreter.clock.advance(20 * 60)
        assert (await interpreter.call(offered, "y")).model_text == snapshot("""\
The code did not run: Container is expired.
Exit code: -1\
""")


async def test_files_of_earlier_turns_are_found() -> None:
    async with run_scripted(
        ScriptedExecution("x", [WriteFile("a b.csv", b"1"), WriteFile("c.csv", b"2")])
    ) as interpreter:
        called = await interpreter.run("x")
        offered = await interpreter.configure()
        found = await offered.find_files(["/mnt/data/a b.csv", "/mnt/data/none.csv", "c.csv"])
        assert found == [called.result.files[0]]
        assert (found[0].filename, found[0].path) == ("a b.csv", "/mnt/data/a b.csv")


# --- items that come back ---------------------------------------------------------------------------------


def replayed(item: object) -> ConversationEntry:
    raw = msgspec.json.encode(item)
    return ConversationEntry(type="code_interpreter_call", id=None, turn=0, raw=raw)


@pytest.mark.parametrize(
    ("item", "output"),
    [
        ({"outputs": [{"type": "logs", "logs": "42\n"}]}, "42\n"),
        (
            {"outputs": [{"type": "logs", "logs": "a"}, {"type": "image", "url": "data:image/png;base64,x"}]},
            "a\n[figure 1]",
        ),
        ({"outputs": []}, "(no output)"),
        ({"outputs": None}, "(the output was not kept)"),
        ({}, "(the output was not kept)"),
    ],
)
async def test_an_item_that_a_client_gives_back(item: dict[str, object], output: str) -> None:
    async with run_scripted() as interpreter:
        given = replayed(
            {"type": "code_interpreter_call", "id": "ci_1", "code": "6 * 7", "container_id": "c", **item}
        )
        exchange = interpreter.tool.rebuild_exchange(given)
        assert exchange is not None
        assert (exchange.call_id, exchange.name, exchange.arguments) == (
            "ci_1",
            "code_interpreter",
            '{"code":"6 * 7"}',
        )
        assert exchange.output == output


async def test_an_item_without_id_and_code() -> None:
    async with run_scripted() as interpreter:
        bare = replayed({"type": "code_interpreter_call", "code": None, "outputs": [{"type": "new", "x": 1}]})
        exchange = interpreter.tool.rebuild_exchange(bare)
        assert exchange is not None
        assert exchange.call_id.startswith("call_")
        assert exchange == interpreter.tool.rebuild_exchange(bare)
        assert (exchange.arguments, exchange.output) == ('{"code":""}', "(no output)")
        assert (
            interpreter.tool.rebuild_exchange(replayed({"type": "code_interpreter_call", "code": 5})) is None
        )


async def test_a_broken_item_in_the_past_means_a_new_container() -> None:
    async with run_scripted(ScriptedExecution("x")) as interpreter:
        interpreter.segments.append(
            ConversationSegment((replayed({"type": "code_interpreter_call", "container_id": 5}),))
        )
        assert (await interpreter.run("x")).model_text == "(no output)"


async def test_what_outlives_a_compaction_finds_the_container_again_and_tells_of_its_files() -> None:
    steps = (ScriptedExecution("x", [WriteFile("a\u202e.txt", b"12345")]), ScriptedExecution("y"))
    async with run_scripted(*steps) as interpreter:
        first = await interpreter.run("x")
        memory = await interpreter.tool.snapshot_state(SOMEBODY, interpreter.segments)
        assert memory is not None
        assert first.item.container_id in memory.note
        assert "/mnt/data/a\N{REPLACEMENT CHARACTER}.txt (5 bytes)" in memory.note
        items = [
            ConversationEntry(type="code_interpreter_call", id=None, turn=0, raw=raw) for raw in memory.items
        ]
        remembered = [ConversationSegment(tuple(items))]
        second = await interpreter.call(await interpreter.configure(None, remembered), "y")
        assert second.item.container_id == first.item.container_id
        # A compaction of a compaction remembers the same; somebody else is told nothing of it.
        assert await interpreter.tool.snapshot_state(SOMEBODY, remembered) == memory
        stranger = await interpreter.tool.snapshot_state(Caller("stranger"), remembered)
        assert stranger is not None
        assert "holds no files" in stranger.note
        assert b"cfile" not in b"".join(stranger.items)
        assert await interpreter.tool.snapshot_state(SOMEBODY, []) is None


async def test_what_outlives_a_compaction_is_small_however_many_files_there_are() -> None:
    steps = [
        ScriptedExecution(f"{number}", [WriteFile(f"{number}-{one}.txt", b"1") for one in range(60)])
        for number in range(4)
    ]
    async with run_scripted(*steps) as interpreter:
        for number in range(4):
            await interpreter.run(f"{number}")
        memory = await interpreter.tool.snapshot_state(SOMEBODY, interpreter.segments)
    assert memory is not None
    assert "and 190 older ones" in memory.note
    (item,) = memory.items
    assert len(msgspec.json.decode(item)["files"]) == 50
