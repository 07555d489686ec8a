"""The layer store: verification, locks, eviction."""

import multiprocessing
import os
import stat
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
from fumehood.sandbox_server.packages import installed_tree_check
from fumehood.sandbox_server.packages.installed_tree_check import InvalidInstallTree
from fumehood.sandbox_server.packages.layer_store import (
    InstallCacheEntry,
    LayerStore,
    PackageLayerHandle,
    PinnedPackage,
)

_PINS = [PinnedPackage("foo", "1.0")]


def _key(number: int) -> str:
    return f"{number:064x}"


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    made = LayerStore(tmp_path / "packages", max_bytes=1 << 20)
    made.open()
    return made


def _add_layer(store: LayerStore, number: int, size: int = 100) -> PackageLayerHandle:
    with store.make_staging_directory() as staging:
        tree = staging / "out"
        tree.mkdir()
        (tree / "foo.py").write_bytes(b"#" * size)
        return store.add_layer(tree, _key(number), _PINS)


def test_a_layer_is_found_again(store: LayerStore) -> None:
    made = _add_layer(store, 1)
    found = store.open_layer(_key(1))
    assert found is not None
    assert found.manifest == made.manifest
    assert found.manifest.pins == _PINS
    assert found.manifest.files == 1
    assert store.open_layer(_key(2)) is None
    assert list((store.path / "staging").iterdir()) == []


def test_the_second_of_two_builders_takes_what_is_there(store: LayerStore) -> None:
    first, second = _add_layer(store, 1), _add_layer(store, 1)
    assert first.key == second.key
    assert len(list(store.layers_directory.iterdir())) == 1


def test_modes_are_made_plain(store: LayerStore) -> None:
    with store.make_staging_directory() as staging:
        tree = staging / "out"
        (tree / "bin").mkdir(parents=True, mode=0o700)
        for name, mode in (("bin/run", 0o4755), ("data", 0o666), ("secret", 0o600)):
            (tree / name).write_text("x")
            (tree / name).chmod(mode)
        store.add_layer(tree, _key(1), _PINS)
    layer = store.layers_directory / _key(1)
    modes = {
        path.relative_to(layer).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in layer.rglob("*")
    }
    assert modes == {"bin": 0o755, "bin/run": 0o755, "data": 0o644, "secret": 0o644}
    assert stat.S_IMODE(layer.stat().st_mode) == 0o755
    assert {path.stat().st_uid for path in layer.rglob("*")} == {os.geteuid()}


@pytest.mark.parametrize("kind", ["symlink", "hardlink", "fifo", "deep", "large", "sparse"])
def test_what_does_not_belong_into_a_layer(store: LayerStore, kind: str) -> None:
    with store.make_staging_directory() as staging:
        tree = staging / "out"
        tree.mkdir()
        (tree / "a").write_text("x")
        match kind:
            case "symlink":
                (tree / "b").symlink_to("/etc/passwd")
            case "hardlink":
                os.link(tree / "a", tree / "b")
            case "fifo":
                os.mkfifo(tree / "b")
            case "deep":
                (tree / "/".join(["d"] * 60)).mkdir(parents=True)
            case "large":
                (tree / "b").write_bytes(bytes(2 << 20))
            case _:
                os.truncate(tree / "a", 1 << 40)
        with pytest.raises(InvalidInstallTree):
            store.add_layer(tree, _key(1), _PINS)
    assert list(store.layers_directory.iterdir()) == []
    assert Path("/etc/passwd").stat().st_mode & 0o777 == 0o644


@pytest.mark.root
def test_devices_do_not_belong_either(tmp_path: Path) -> None:
    os.mknod(tmp_path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with pytest.raises(InvalidInstallTree):
        installed_tree_check.verify_tree(str(tmp_path), max_bytes=1 << 20)


def test_the_least_recently_used_goes_first_unless_it_is_held(store: LayerStore) -> None:
    layers: list[PackageLayerHandle] = []
    for number in range(4):
        layers.append(_add_layer(store, number, size=400_000))
        os.utime(store.path / "manifests" / f"{_key(number)}.json", (number, number))
        if number != 1:
            layers[number].close()
    assert store.evict() == [_key(0), _key(2)]
    assert sorted(path.name for path in store.layers_directory.iterdir()) == [_key(1), _key(3)]
    assert list((store.path / "staging").iterdir()) == []
    layers[1].close()
    os.utime(store.path / "manifests" / f"{_key(1)}.json", (1, 1))
    LayerStore(store.path, max_bytes=500_000).evict()
    assert [path.name for path in store.layers_directory.iterdir()] == [_key(3)]


def _hold_layer(path: str, ready: Event, end: Event) -> None:
    store = LayerStore(Path(path), max_bytes=1)
    layer = store.open_layer(_key(1))
    with store.make_staging_directory():
        ready.set()
        end.wait(60)
    assert layer is not None


def test_another_process_s_layers_and_work_are_left_alone(store: LayerStore) -> None:
    _add_layer(store, 1, size=10_000).close()
    context = multiprocessing.get_context("spawn")
    ready, end = context.Event(), context.Event()
    process = context.Process(target=_hold_layer, args=(str(store.path), ready, end))
    process.start()
    try:
        assert ready.wait(60)
        other = LayerStore(store.path, max_bytes=1)
        assert other.evict() == []
        other.remove_abandoned_staging()
        assert len(list((store.path / "staging").iterdir())) == 1
        process.kill()
        process.join(60)
        assert len(list((store.path / "staging").iterdir())) == 1  # it was killed in the middle of its work
        other.open()
        assert list((store.path / "staging").iterdir()) == []
        assert other.evict() == [_key(1)]
    finally:
        process.kill()
        process.join(60)
        process.close()


def test_requests_are_remembered(store: LayerStore) -> None:
    request = InstallCacheEntry(_PINS, _key(1), {"numpy": "1.26"}, 12.5)
    assert store.load_record(_key(7)) is None
    store.save_record(_key(7), request)
    assert store.load_record(_key(7)) == request
    (store.path / "requests" / f"{_key(7)}.json").write_text("{nonsense")
    assert store.load_record(_key(7)) is None


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(IsolationUnavailable, match="packages_dir"):
        LayerStore(tmp_path, max_bytes=1).open()
