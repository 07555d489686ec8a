"""Secret files must not be accessible to other users."""

import os
import stat
from pathlib import Path

import pytest

from fumehood.http_server.secret_files import InsecureSecretFile, check_secret_file, read_secret_file

OTHER_USER = os.geteuid() + 1000


def _secret(tmp_path: Path, mode: int) -> Path:
    file = tmp_path / "secret"
    file.write_bytes(b"secret")
    file.chmod(mode)
    return file


def _status(*, mode: int, owner: int, kind: int = stat.S_IFREG) -> os.stat_result:
    return os.stat_result((kind | mode, 1, 1, 1, owner, 1, 0, 0, 0, 0))


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_file_of_our_own_is_read(tmp_path: Path, mode: int) -> None:
    assert read_secret_file(_secret(tmp_path, mode)) == b"secret"


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o601, 0o660, 0o620, 0o610])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    file = _secret(tmp_path, mode)
    with pytest.raises(InsecureSecretFile, match=f"chmod 600 {file}"):
        read_secret_file(file)


def test_what_a_link_leads_to_is_looked_at(tmp_path: Path) -> None:
    """Kubernetes mounts secrets as links into a directory that is replaced as a whole."""
    version = tmp_path / "..2026"
    version.mkdir()
    (tmp_path / "..data").symlink_to(version.name)
    file = _secret(version, 0o400)
    (tmp_path / "token").symlink_to("..data/secret")
    assert read_secret_file(tmp_path / "token") == b"secret"
    file.chmod(0o444)
    with pytest.raises(InsecureSecretFile, match="defaultMode: 0400"):
        read_secret_file(tmp_path / "token")


@pytest.mark.parametrize(
    ("mode", "owner", "refusal"),
    [
        (0o440, 0, None),  # of a pod with fsGroup, or of systemd's credentials
        (0o400, 0, None),
        (0o460, 0, "its group may read or change it"),
        (0o444, 0, "other users may read it"),
        (0o600, OTHER_USER, f"belongs to another user .* chown {os.geteuid()}"),
        (0o440, OTHER_USER, "belongs to another user"),
    ],
)
def test_owners_and_groups(mode: int, owner: int, refusal: str | None) -> None:
    status = _status(mode=mode, owner=owner)
    if refusal is None:
        check_secret_file(status, Path("secret"))
        return
    with pytest.raises(InsecureSecretFile, match=refusal):
        check_secret_file(status, Path("secret"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = _secret(tmp_path, 0o600)
    os.chown(file, OTHER_USER, OTHER_USER)
    with pytest.raises(InsecureSecretFile, match=f"chown 0 {file}"):
        read_secret_file(file)


def test_a_pipe_is_read_and_a_directory_is_not(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"piped")
        os.close(writing)
        assert read_secret_file(Path(f"/dev/fd/{reading}")) == b"piped"
    finally:
        os.close(reading)
    with pytest.raises(InsecureSecretFile, match="not a regular file"):
        check_secret_file(_status(mode=0o600, owner=0, kind=stat.S_IFCHR), Path("/dev/tty"))
