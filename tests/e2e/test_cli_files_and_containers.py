"""`fumehood files` and `fumehood containers` against a gateway with real sandboxes."""

import io
import zipfile
from pathlib import Path

import pytest

from tests.e2e.conftest import RunningGateway
from tests.support.cli_runner import clear_server_environment, run_command


@pytest.fixture
def url(gateway: RunningGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    clear_server_environment(monkeypatch)
    return gateway.process.url


# ---- files -------------------------------------------------------------------------------------------------------


def test_files_from_upload_to_removal(url: str, tmp_path: Path) -> None:
    content = b"a,b\n1,2\n" * 100_000
    (tmp_path / 'räte "x".csv').write_bytes(content)
    uploaded = run_command("files", "upload", 'räte "x".csv', "--expires-after", "7200", url=url)
    assert (uploaded.code, uploaded.err) == (0, "")
    file_id = uploaded.out
    assert file_id.startswith("file-")
    row = next(row for row in run_command("files", "list", "--json", url=url).rows if row["id"] == file_id)
    assert (row["id"], row["bytes"], row["purpose"]) == (file_id, len(content), "user_data")
    assert row["expires_at"] == row["created_at"] + 7200
    table = run_command("files", "list", url=url).out.splitlines()
    assert table[0].split() == ["ID", "BYTES", "CREATED", "EXPIRES", "PURPOSE", "NAME"]
    assert any(file_id in line and "800,000" in line for line in table[1:])
    shown = run_command("files", "show", file_id, url=url).out
    assert "user_data" in shown
    assert run_command("files", "show", "--json", file_id, url=url).rows == [row]

    saved = run_command("files", "get", file_id, "-o", "copy.csv", url=url)
    assert saved.err == "Saved copy.csv (800,000 bytes)."
    assert (tmp_path / "copy.csv").read_bytes() == content
    assert run_command("files", "get", file_id, "-o", "-", url=url).raw == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.csv", 'räte "x".csv'], (
        "something was left"
    )

    removed = run_command("files", "rm", file_id, "file-none", url=url)
    assert removed.code == 1
    assert removed.err.splitlines()[0] == f"Deleted {file_id}."
    assert removed.err.splitlines()[1].startswith("file-none: ")
    assert file_id not in run_command("files", "list", url=url).out
    assert run_command("files", "list", "--purpose", "vision", url=url).err == "There are no files."


def test_a_file_is_never_replaced_unless_it_is_wanted(url: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"new")
    file_id = run_command("files", "upload", "a.txt", url=url).out
    (tmp_path / "a.txt").write_bytes(b"mine")
    for arguments in ((), ("-o", "a.txt"), ("-o", ".")):
        refused = run_command("files", "get", file_id, *arguments, url=url)
        assert (refused.code, refused.err) == (1, "a.txt exists; --force overwrites it.")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert run_command("files", "get", file_id, "-o", "link", url=url).code == 1
    assert (tmp_path / "a.txt").read_bytes() == b"mine"
    assert run_command("files", "get", file_id, "--force", url=url).code == 0
    assert (tmp_path / "a.txt").read_bytes() == b"new"
    (tmp_path / "below").mkdir()
    assert run_command("files", "get", file_id, "-o", "below", url=url).code == 0
    assert (tmp_path / "below" / "a.txt").read_bytes() == b"new"
    assert run_command("files", "get", file_id, "-o", "not/there", url=url).err == (
        "not/there cannot be written: No such file or directory."
    )
    assert not (tmp_path / "nowhere").exists()


# ---- containers --------------------------------------------------------------------------------------------------


def test_containers_from_creation_to_removal(url: str, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b"1,2\n")
    upload = run_command("files", "upload", "in.csv", url=url).out
    made = run_command("containers", "create", "--name", "mine", "--minutes", "5", "--file", upload, url=url)
    assert made.code == 0, made
    container = made.out
    (row,) = run_command("containers", "list", "--name", "mine", "--json", url=url).rows
    assert (row["id"], row["status"], row["expires_after"]["minutes"]) == (container, "running", 5)
    assert container in run_command("containers", "list", url=url).out
    assert "mine" in run_command("containers", "show", container, url=url).out

    assert (
        run_command("containers", "put", container, "in.csv", "--as", "d/out.csv", url=url).err
        == "Put /mnt/data/d/out.csv."
    )
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("z/one.txt", "one")
        packed.writestr("z/two.txt", "two")
    (tmp_path / "all.zip").write_bytes(archive.getvalue())
    unpacked = run_command("containers", "put", container, "all.zip", "--unpack", url=url)
    assert (unpacked.code, unpacked.err) == (0, "Put /mnt/data/z/one.txt and 1 more.")
    found = {
        row["path"]: row for row in run_command("containers", "files", container, "--json", url=url).rows
    }
    unpacked_paths = {"/mnt/data/z/one.txt", "/mnt/data/z/two.txt"}
    assert found.keys() == {"/mnt/data/in.csv", "/mnt/data/d/out.csv", *unpacked_paths}
    assert "/mnt/data/z/one.txt" in run_command("containers", "files", container, url=url).out
    listed = run_command("containers", "files", container, "--limit", "2", url=url)
    assert listed.err == "There are more than 2; use --limit to list them."

    by_path = run_command("containers", "get", container, "d/out.csv", url=url)
    assert by_path.err == "Saved out.csv (4 bytes)."
    by_id = run_command(
        "containers", "get", container, found["/mnt/data/z/one.txt"]["id"], "-o", "-", url=url
    )
    assert by_id.out == "one"
    missing = run_command("containers", "get", container, "none.csv", url=url)
    assert (missing.code, missing.err) == (1, "The container has no file /mnt/data/none.csv.")

    assert run_command("containers", "rm", container, url=url).err == f"Deleted {container}."
    gone = run_command("containers", "show", container, url=url)
    assert gone.code == 1
    assert len(gone.err.splitlines()) == 1


def test_mistakes_are_told_in_one_sentence(url: str) -> None:
    for arguments in (
        ("containers", "show", "cntr_none"),
        ("files", "show", "../../x"),
        ("files", "get", "file-none"),
    ):
        done = run_command(*arguments, url=url)
        assert (done.code, done.out, len(done.err.splitlines())) == (1, "", 1)
    assert run_command("files", "list", "--base-url", "ftp://x").code == 2
    assert run_command("files", "list", "--base-url", "http://me:secret@127.0.0.1").code == 2
    assert run_command("files", "upload", "none.txt", url=url).code == 2
