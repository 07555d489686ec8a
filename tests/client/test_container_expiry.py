"""Containers of workspaces that expire, fail, are shared and outlive their client."""

import itertools
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fumehood.client import (
    CompactionError,
    ContainerExpiredError,
    ContainerNotFoundError,
    Deadline,
    DeadlineExceededError,
    FumehoodError,
    HostWorkspaceSection,
    PromptEvaluationError,
    Session,
    ThrottleError,
    ThrottlePolicy,
    Tool,
    ToolContext,
    ToolResult,
)
from fumehood.client.adapters.openai import (
    ContainerConfig,
    ContainerFilesystem,
    OpenAIAdapter,
)
from fumehood.client.adapters.openai.container_errors import ContainerGoneError
from fumehood.client.prompt import NoParams
from tests.client.conftest import CreateWorkspace, OpenAIStandIn
from tests.support.client_prompts import HOSTED, function_call, prompt
from tests.support.openai_server import Reply, error, message, response

ALL_MODES = {
    "test_a_container_that_a_tool_has_renewed_is_not_created_again",
    "test_a_deadline_includes_the_upload",
    "test_a_workspace_after_cleanup_is_rejected",
    "test_the_error_of_an_unreachable_provider_names_it",
    "test_a_model_name_with_container_is_no_expired_container",
}

QUICK = ThrottlePolicy(base_delay=0)


def count_created_containers(openai_stand_in: OpenAIStandIn) -> int:
    return openai_stand_in.server.calls.count("POST /v1/containers")


class RequestInterceptor:
    """Answers requests about containers instead of the server, as long as it has something to say."""

    def __init__(self, openai_stand_in: OpenAIStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
        self.says: Callable[[str, str], Reply | None] = lambda method, path: None
        server = openai_stand_in.server
        answer = server.answer

        def first(method: str, target: str, kind: str, body: bytes) -> Reply:
            reply = self.says(method, target.partition("?")[0]) if "/containers" in target else None
            return answer(method, target, kind, body) if reply is None else reply

        monkeypatch.setattr(server, "answer", first)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python ignores SIGINT if it was started in the background of a shell without job control."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def interceptor(openai_stand_in: OpenAIStandIn, monkeypatch: pytest.MonkeyPatch) -> RequestInterceptor:
    return RequestInterceptor(openai_stand_in, monkeypatch)


# --- expiry -------------------------------------------------------------------------------------------


def test_a_container_that_a_tool_has_renewed_is_not_created_again(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace
) -> None:
    workspace = create_workspace(client=openai_stand_in.client)

    def note(params: NoParams, *, context: ToolContext) -> ToolResult[NoParams]:
        openai_stand_in.server.expire()
        assert context.filesystem is not None
        context.filesystem.write_text("note.txt", "n")
        return ToolResult.ok(params)

    def look(asked: dict[str, Any]) -> Reply:
        named = openai_stand_in.server.containers[asked["tools"][1]["container"]]
        return error(400, "Container is expired.") if named.status == "expired" else response(message("fine"))

    tool = Tool[NoParams, NoParams](name="note", description="Note it.", handler=note)
    openai_stand_in.evaluate(
        prompt(tool, sections=(workspace,)),
        response(function_call("c1", "{}", "note")),
        look,
        look,
        hosted_tools=HOSTED,
    )
    assert count_created_containers(openai_stand_in) == 2
    assert openai_stand_in.server.asked[-1]["tools"][1]["container"] == workspace.container_id


def test_threads_share_the_renewed_container(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace
) -> None:
    files = create_workspace(client=openai_stand_in.client).filesystem
    files.ensure_container()
    openai_stand_in.server.script()
    openai_stand_in.server.expire()
    with ThreadPoolExecutor(5) as pool:
        assert [*pool.map(files.is_file, ["no"] * 5)] == [False] * 5
    assert count_created_containers(openai_stand_in) == 1


def test_a_container_that_expires_before_a_download_is_renewed(
    openai_stand_in: OpenAIStandIn, interceptor: RequestInterceptor, create_workspace: CreateWorkspace
) -> None:
    files = create_workspace(client=openai_stand_in.client).filesystem
    files.write_text("notes.txt", "mine")

    def expire(method: str, path: str) -> None:
        if path.endswith("/content"):
            interceptor.says = lambda method, path: None
            openai_stand_in.server.expire()

    interceptor.says = expire
    assert files.read_text("notes.txt") == "mine"


def test_replaced_files_are_restored_in_a_new_container(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace
) -> None:
    files = create_workspace(client=openai_stand_in.client).filesystem
    files.delete("project/src/main.py")
    files.write_text("project/src", "a file now")
    files.write_text("notes.txt", "n")
    files.delete("notes.txt")
    files.write_text("notes.txt/one", "1")
    openai_stand_in.server.expire()
    assert files.glob("**") == ["notes.txt/one", "project/README.md", "project/src", "project/tool.exe"]
    assert files.read_text("project/src") == "a file now"


# --- failures on the way ------------------------------------------------------------------------------


def test_a_container_that_could_not_be_filled_is_deleted(
    openai_stand_in: OpenAIStandIn, interceptor: RequestInterceptor, create_workspace: CreateWorkspace
) -> None:
    files = create_workspace(client=openai_stand_in.client).filesystem
    openai_stand_in.server.containers.clear()
    interceptor.says = lambda method, path: error(413, "Too large.") if path.endswith("/files") else None
    with pytest.raises(PromptEvaluationError, match=r"\(413\): Too large\. \(.*exclude_glob"):
        files.ensure_container()
    assert openai_stand_in.server.containers == {}
    assert files.container_id is None


def test_container_requests_to_a_busy_provider_are_retried(
    openai_stand_in: OpenAIStandIn, interceptor: RequestInterceptor, create_workspace: CreateWorkspace
) -> None:
    busy = [error(429, "Slow down.", retry_after_ms="1"), error(503, "Later."), Reply(closes=True)]
    tried: set[str] = set()

    def refuse(method: str, path: str) -> Reply | None:
        """The first of each kind."""
        kind = f"{method} {path.count('/')}"
        if kind in tried or not busy:
            return None
        tried.add(kind)
        return busy.pop(0)

    interceptor.says = refuse
    openai_stand_in.server.script(response(message("fine")))
    workspace = create_workspace()
    adapter = openai_stand_in.adapter(hosted_tools=HOSTED, throttle=QUICK)
    assert adapter.evaluate(prompt(sections=(workspace,))).text == "fine"
    assert workspace.filesystem.read_text("project/README.md") == "# Hi"
    assert busy == []


def test_a_deadline_includes_the_upload(
    openai_stand_in: OpenAIStandIn, interceptor: RequestInterceptor, create_workspace: CreateWorkspace
) -> None:
    over = threading.Event()

    def hang(method: str, path: str) -> Reply | None:
        if not path.endswith("/files"):
            return None
        over.wait(60)
        return Reply(closes=True)

    interceptor.says = hang
    workspace = create_workspace()
    with pytest.raises(DeadlineExceededError):
        openai_stand_in.adapter(hosted_tools=HOSTED).evaluate(
            prompt(sections=(workspace,)), deadline=Deadline.after(0.3)
        )
    over.set()
    assert "POST /v1/responses" not in openai_stand_in.server.calls
    assert workspace.container_id is None


def test_a_workspace_after_cleanup_is_rejected(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace
) -> None:
    workspace = create_workspace(client=openai_stand_in.client)
    here = HostWorkspaceSection(session=Session())
    for section in (workspace, here):
        section.cleanup()
        with pytest.raises(PromptEvaluationError, match="was cleaned up") as refused:
            openai_stand_in.adapter(hosted_tools=HOSTED).evaluate(prompt(sections=(section,)))
        assert refused.value.phase == "configuration"
    for act in (workspace.filesystem.ensure_container, lambda: workspace.filesystem.exists("x")):
        with pytest.raises(PromptEvaluationError, match="was cleaned up"):
            act()
    assert openai_stand_in.server.calls == []


# --- clients ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("openai_environment")
def test_files_are_synced_after_the_adapter_was_closed(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace, tmp_path: Path
) -> None:
    workspace = create_workspace(sync_on_cleanup=True, sync_dir=tmp_path / "back")
    adapter = OpenAIAdapter(model="gpt-4.1", hosted_tools=HOSTED)
    openai_stand_in.server.script(response(message("one")), response(message("two")))
    for text in ("one", "two"):
        with adapter:
            assert adapter.evaluate(prompt(sections=(workspace,))).text == text
    assert count_created_containers(openai_stand_in) == 1
    openai_stand_in.server.containers[workspace.container_id or ""].files["cfile_x"] = (
        "report.md",
        b"# Report",
    )
    client = workspace.filesystem.client
    workspace.cleanup()
    assert (tmp_path / "back/report.md").read_text() == "# Report"
    assert client.is_closed()


@pytest.mark.usefixtures("openai_environment")
def test_files_can_be_written_before_the_first_evaluation(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace
) -> None:
    workspace = create_workspace()
    workspace.filesystem.write_text("notes.txt", "mine")
    openai_stand_in.server.script(response(message("fine")))
    with OpenAIAdapter(model="gpt-4.1", hosted_tools=HOSTED) as adapter:
        assert adapter.evaluate(prompt(sections=(workspace,))).text == "fine"
    assert workspace.filesystem.read_text("notes.txt") == "mine"
    (request,) = openai_stand_in.server.asked
    ((_, (directory, _)),) = [*openai_stand_in.server.containers[workspace.container_id or ""].files.items()][
        1:
    ]
    assert f"- `notes.txt` is `/mnt/data/{directory}`" in request["input"][0]["content"]


# --- what comes back ----------------------------------------------------------------------------------


def filesystem_with_files(openai_stand_in: OpenAIStandIn, number: int) -> ContainerFilesystem:
    files = ContainerFilesystem(client=openai_stand_in.client, container_config=ContainerConfig())
    stored = openai_stand_in.server.containers[files.ensure_container()].files
    stored |= {f"cfile_x{one}": (f"out/{one}", b"%d" % one) for one in range(number)}
    return files


def test_files_that_cannot_be_stored_do_not_stop_the_download(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace, tmp_path: Path
) -> None:
    workspace = create_workspace(
        client=openai_stand_in.client, sync_on_cleanup=True, sync_dir=tmp_path / "back"
    )
    made = workspace.filesystem.ensure_container()
    openai_stand_in.server.containers[made].files |= {
        "cfile_a": ("a", b"1"),
        "cfile_b": ("a/b", b"2"),
        "cfile_c": ("n" * 300, b"3"),
        "cfile_d": ("z.txt", b"last"),
        "cfile_e": ("/etc/evil", b"x"),
        "cfile_f": ("link/evil", b"x"),
    }
    (tmp_path / "back").mkdir()
    (tmp_path / "back/link").symlink_to(tmp_path)
    with pytest.raises(
        OSError, match=r"3 file\(s\) could not be brought back, among them 'a/b': NotADir"
    ) as failed:
        workspace.cleanup()
    assert failed.value.__notes__ == [
        "The container is still there: workspace.filesystem.download_all tries again."
    ]
    assert (tmp_path / "back/z.txt").read_bytes() == b"last"
    assert not workspace.temp_dir.exists()
    assert not list(tmp_path.rglob("evil"))
    assert not list(tmp_path.rglob("*.part"))
    openai_stand_in.server.containers[made].files = {"cfile_d": ("z.txt", b"again")}
    workspace.filesystem.download_all(tmp_path / "back")
    assert (tmp_path / "back/z.txt").read_bytes() == b"again"


def test_an_interrupted_download_leaves_the_old_file(
    openai_stand_in: OpenAIStandIn, interceptor: RequestInterceptor, tmp_path: Path
) -> None:
    files = ContainerFilesystem(client=openai_stand_in.client, container_config=ContainerConfig())
    files.policy = ThrottlePolicy(max_attempts=2, base_delay=0)
    files.write("a.txt", b"new")
    (tmp_path / "a.txt").write_text("old")
    short = Reply(b"ne", headers={"content-length": "3", "connection": "close"})
    interceptor.says = lambda method, path: short if path.endswith("/content") else None
    with pytest.raises(PromptEvaluationError, match="2 attempts"):
        files.download_all(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_a_download_makes_one_request_for_each_file(openai_stand_in: OpenAIStandIn, tmp_path: Path) -> None:
    files = filesystem_with_files(openai_stand_in, 20)
    openai_stand_in.server.script()
    files.download_all(tmp_path / "new")
    assert len([*(tmp_path / "new/out").iterdir()]) == 20
    assert len(openai_stand_in.server.calls) == 21


def download_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("fumehood download")]


def test_files_are_downloaded_eight_at_a_time(
    openai_stand_in: OpenAIStandIn, interceptor: RequestInterceptor, tmp_path: Path
) -> None:
    eight, lock = threading.Barrier(8), threading.Lock()
    now = most = 0

    def wait_for_the_others(method: str, path: str) -> None:
        nonlocal now, most
        if path.endswith("/content"):
            with lock:
                now += 1
                most = max(most, now)
            eight.wait(20)
            with lock:
                now -= 1

    files = filesystem_with_files(openai_stand_in, 24)
    interceptor.says = wait_for_the_others
    files.download_all(tmp_path / "new")
    assert {path.name: path.read_text() for path in (tmp_path / "new/out").iterdir()} == {
        str(number): str(number) for number in range(24)
    }
    assert most == 8
    assert download_threads() == []


def test_the_first_error_cancels_other_downloads(
    openai_stand_in: OpenAIStandIn, interceptor: RequestInterceptor, tmp_path: Path
) -> None:
    """Also those of which nothing comes, and those that wait to be tried again."""
    eight, never = threading.Barrier(8), threading.Event()
    numbers = itertools.count()

    def refuse_one(method: str, path: str) -> Reply | None:
        if not path.endswith("/content"):
            return None
        number = next(numbers)
        eight.wait(20)
        if number == 0:
            return error(403, "Not this one.")
        if number < 4:
            return error(503, "Later.", retry_after="3000")
        never.wait(60)
        return None

    files = filesystem_with_files(openai_stand_in, 100)
    files.policy = ThrottlePolicy(max_total_delay=10_000)
    interceptor.says = refuse_one
    (tmp_path / "out").mkdir()
    (tmp_path / "out/7").write_text("old")
    try:
        with pytest.raises(PromptEvaluationError, match="Not this one"):
            files.download_all(tmp_path)
        assert next(numbers) == 8
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["7"]
        left = download_threads()
        assert len(left) <= 4, "those that wait end at once"
    finally:
        never.set()
    for thread in left:
        thread.join(20)
        assert not thread.is_alive()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["7"]
    assert (tmp_path / "out/7").read_text() == "old"


def test_an_interrupted_download_returns_at_once(
    openai_stand_in: OpenAIStandIn, interceptor: RequestInterceptor, tmp_path: Path, interruptible: None
) -> None:
    never = threading.Event()
    interrupted = threading.Lock()

    def stall(method: str, path: str) -> None:
        if path.endswith("/content"):
            if interrupted.acquire(blocking=False):
                # As Ctrl-C does: a signal that wakes the main thread, which waits.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            never.wait(60)

    files = filesystem_with_files(openai_stand_in, 3)
    interceptor.says = stall
    try:
        with pytest.raises(KeyboardInterrupt):
            files.download_all(tmp_path)
        assert not list(tmp_path.rglob("*.part"))
    finally:
        never.set()
    for thread in download_threads():
        thread.join(20)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_failed_downloads_are_listed_by_name(
    openai_stand_in: OpenAIStandIn, interceptor: RequestInterceptor, tmp_path: Path
) -> None:
    eight = threading.Barrier(8)
    files = filesystem_with_files(openai_stand_in, 8)
    listed = sorted(openai_stand_in.server.containers[files.container_id or ""].files)

    def lose_all(method: str, path: str) -> Reply | None:
        if not path.endswith("/content"):
            return None
        eight.wait(20)
        return error(404, f"There is no file {path.split('/')[-2]} in the container.")

    interceptor.says = lose_all
    with pytest.raises(OSError, match=r"8 file\(s\) could not be brought back, among them 'out/0'") as failed:
        files.download_all(tmp_path)
    assert listed[0] in str(failed.value)
    assert not list((tmp_path / "out").iterdir())


# --- a server that unpacks nothing --------------------------------------------------------------------


def test_unpacking_overwrites_no_files(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace, tmp_path: Path
) -> None:
    """The prompt says it in every turn; what an earlier one has made of the files has to stay."""
    workspace = create_workspace()
    openai_stand_in.evaluate(prompt(sections=(workspace,)), response(message("fine")), hosted_tools=HOSTED)
    text: str = openai_stand_in.server.asked[0]["input"][0]["content"]
    directory = tmp_path / "data"
    directory.mkdir()
    for name, content in openai_stand_in.server.containers[workspace.container_id or ""].files.values():
        (directory / name).write_bytes(content)
    code = text.partition("```python\n")[2].partition("```")[0].replace("/mnt/data/", f"{directory}/")
    exec(code, {})
    assert (directory / "project/src/main.py").read_text() == "print(1)"
    (directory / "project/src/main.py").write_text("changed")
    (directory / "project/README.md").unlink()
    exec(code, {})
    assert (directory / "project/src/main.py").read_text() == "changed"
    assert (directory / "project/README.md").read_text() == "# Hi"


def test_written_files_precede_unpacked_ones(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace
) -> None:
    files = create_workspace(client=openai_stand_in.client).filesystem
    stored = openai_stand_in.server.containers[files.ensure_container()].files
    stored["cfile_x"] = ("project/src/main.py", b"unpacked")
    assert files.read("project/src/main.py") == b"unpacked"
    for content in (b"mine", b"mine again"):
        files.write("project/src/main.py", content)
        assert files.read("project/src/main.py") == content
    assert len(stored) == 3  # the archive, what code has unpacked, and what was written last
    assert "cfile_x" in stored
    assert files.relocated_files.keys() == {"project/src/main.py"}
    files.delete("project/src/main.py")
    assert files.relocated_files == {}


# --- errors -------------------------------------------------------------------------------------------


def test_errors_can_be_pickled() -> None:
    answered = CompactionError(7, ValueError("x"))
    answered.response = "the answer"
    for raised in (
        ContainerExpiredError("cntr_1", ValueError("x")),
        ContainerExpiredError("cntr_1", ValueError("x"), "in other words"),
        ContainerNotFoundError("cntr_1", ContainerGoneError("gone", body={"a": 1}), "unknown"),
        answered,
        PromptEvaluationError("no", prompt_name="p", phase="tool", provider_payload={"a": 1}),
    ):
        back: FumehoodError = pickle.loads(pickle.dumps(raised))
        assert (type(back), str(back)) == (type(raised), str(raised))
        assert {name: str(value) for name, value in vars(back).items()} == {
            name: str(value) for name, value in vars(raised).items()
        }


def test_the_error_of_an_unreachable_provider_names_it(openai_stand_in: OpenAIStandIn) -> None:
    throttle = ThrottlePolicy(max_attempts=2, base_delay=0)
    origin = openai_stand_in.server.url.removesuffix("/v1")
    with pytest.raises(ThrottleError, match=rf"could not be reached in 2 attempts: .*\({origin}\)"):
        openai_stand_in.evaluate(prompt(), *[Reply(closes=True)] * 9, throttle=throttle)
    assert len(openai_stand_in.server.calls) == 2


def test_a_model_name_with_container_is_no_expired_container(openai_stand_in: OpenAIStandIn) -> None:
    with pytest.raises(PromptEvaluationError, match="no model container-7b"):
        openai_stand_in.evaluate(
            prompt(),
            error(404, "There is no model container-7b.", "model_not_found"),
            model="container-7b",
        )
