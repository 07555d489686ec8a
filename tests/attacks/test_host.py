"""Attacks on the host's files, memory and paths."""

import os
import pwd
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from fumehood.sandbox_server.host.python_runtime import discover_runtime
from fumehood.sandbox_server.inside import layout
from tests.attacks.conftest import Host
from tests.support.driver_client import PROJECT, SandboxClient

_LIBRARY = Path(sysconfig.get_path("stdlib")).name
WRITABLE = {"/mnt/data", "/tmp", "/home/user", "/dev/shm"}


@pytest.fixture
def host_file(host: Host) -> Iterator[Path]:
    """A file that everybody on the host may read."""
    path = Path("/var/tmp") / f"fumehood-attack-{os.getpid()}"
    path.write_text(host.driver.secret)
    path.chmod(0o644)
    yield path
    path.unlink()


def test_a_host_file_is_not_there(host: Host, box: SandboxClient, host_file: Path) -> None:
    places = [str(host_file), f"/proc/1/root{host_file}", f"/proc/self/root{host_file}", str(PROJECT)]
    places += [f"{'../' * 12}{host_file}", "/etc/shadow", "/root", "/var", "/sys", "/work", "/boot"]
    places += [os.path.realpath(sys.executable), os.path.expanduser("~")]
    answer = box.ask(f"report({{path: attempt(os.stat, path) for path in {places!r}}})")
    assert set(answer.values()) <= {"ENOENT", "EACCES"}
    assert answer[str(host_file)] == "ENOENT"


def test_passwd_is_the_sandboxes_own(box: SandboxClient) -> None:
    lines = box.ask("report(open('/etc/passwd').read().splitlines())")
    assert [line.split(":")[0] for line in lines] == ["root", "user", "nobody"]


def test_the_secret_is_in_no_environment(host: Host, box: SandboxClient) -> None:
    program = """
        import glob
        found = {"os.environ": repr(dict(os.environ)), "env": os.popen("env").read()}
        for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/task/*/environ"):
            try:
                found[path] = open(path, errors="replace").read()
            except OSError as error:
                found[path] = name_of(error.errno)
        report(found)
    """
    found = box.ask(dedent(program))
    assert found["/proc/1/environ"] == "EACCES"
    assert "PATH=" in found[f"/proc/{box.ask('report(os.getpid())')}/environ"]
    assert host.driver.secret not in repr(found)
    assert {"FUMEHOOD", "PYENV", "VIRTUAL_ENV", "SUDO_USER"}.isdisjoint(repr(found).upper().split("="))


HEAP_SCAN = """
    needle = bytes.fromhex({needle!r})[::-1]  # turned round here, so that this program is not what it finds
    hits, size, regions = 0, 0, 0
    own = id(needle)
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps.read().splitlines():
            span, rights, *_ = line.split()
            low, high = (int(end, 16) for end in span.split("-"))
            if "r" not in rights or line.endswith(("[vvar]", "[vsyscall]", "[vvar_vclock]")):
                continue
            regions += 1
            tail = b""
            for start in range(low, high, 1 << 20):
                try:
                    memory.seek(start)
                    piece = memory.read(min(1 << 20, high - start))
                except (OSError, OverflowError):
                    break
                size += len(piece)
                at = (tail + piece).find(needle)
                while at >= 0:
                    where = start - len(tail) + at
                    if not own <= where < own + 200:
                        hits += 1
                    at = (tail + piece).find(needle, at + 1)
                tail = piece[-64:]
                del piece
    report([hits, size, regions])
"""


def test_the_secret_is_nowhere_in_the_address_space(host: Host, box: SandboxClient) -> None:
    """The sandbox is forked from a process that was executed afresh, so the supervisor's heap is not in it."""
    scan = dedent(HEAP_SCAN)
    absent = host.driver.secret.removeprefix("planted-").encode()[::-1].hex()
    hits, size, regions = box.ask(scan.format(needle=absent), timeout=60)
    assert hits == 0
    assert size > 50 << 20
    assert regions > 50
    # The scan is able to find things: what the sandbox itself knows is there.
    box.run("known = 'needle-' + 'in-the-hay' * 3")
    hits, _, _ = box.ask(scan.format(needle=("in-the-hay" * 3).encode()[::-1].hex()), timeout=60)
    assert hits > 0


def test_init_is_closed(box: SandboxClient) -> None:
    """Where one kernel user is both, init is still undumpable, and in no user namespace of the code's."""
    program = """
        def look(path):
            if os.path.isdir(path): return os.listdir(path)
            with open(path, "rb") as file: return file.read(1)
        names = ["mem", "environ", "maps", "fd", "root", "cwd", "exe", "ns/mnt", "syscall", "stack", "io", "fdinfo"]
        answers = {name: attempt(look, f"/proc/1/{name}") for name in names}
        links = {name: attempt(os.readlink, f"/proc/1/{name}") for name in ("root", "cwd", "exe", "ns/mnt", "fd/0")}
        report([answers, links])
    """
    answers, links = box.ask(dedent(program))
    # Where one kernel user is both, it shows that init has no descriptors.
    assert answers.pop("fd") in ("EACCES", "EPERM", "returned []")
    assert set(answers.values()) <= {"EACCES", "EPERM", "ENOENT"}
    assert links.pop("fd/0") in ("EACCES", "EPERM", "ENOENT")
    assert set(links.values()) <= {"EACCES", "EPERM"}


def test_proc_shows_no_path_of_the_host(box: SandboxClient) -> None:
    program = """
        files = ("mountinfo", "mounts", "mountstats", "maps", "cgroup", "cmdline", "environ", "status", "stat")
        report({name: open(f"/proc/self/{name}", errors="replace").read() for name in files})
    """
    shown = box.ask(dedent(program))
    homes = {entry.pw_dir for entry in pwd.getpwall() if entry.pw_dir.count("/") > 1}
    homes -= {"/home/user"}
    homes = {home for home in homes if home.startswith(("/home", "/root"))}
    for words in (
        str(PROJECT),
        "pyenv",
        ".venv",
        os.path.expanduser("~") + "/",
        "fumehood-",
        "/dev/vda",
        *homes,
    ):
        for name, text in shown.items():
            assert words not in text, f"{words!r} in /proc/self/{name}"
    assert {line.rpartition(":")[2] for line in shown["cgroup"].splitlines()} <= {"/"}


def test_a_new_process_finds_no_package_of_the_host(box: SandboxClient) -> None:
    """What is installed beside the sandbox's packages is there for no interpreter that code can start."""
    ours = {path for directory in discover_runtime().packages for path in directory.visible_names}
    beside = {path.name for path in Path(sysconfig.get_path("platlib")).iterdir() if path.is_dir()}
    names = sorted(
        name
        for name in beside - ours | {"fumehood"}
        if name.isidentifier() and name not in ("pip", "__pycache__")
    )
    assert {"uvicorn", "cryptography", "starlette", "pytest"} <= set(names)
    program = f"""
        import glob, subprocess, sys
        names = {names!r}
        ask = "import sys, importlib.util as u; print([n for n in sys.argv[1:] if u.find_spec(n)])"
        pythons = [sys.executable, *glob.glob("/usr/bin/python3*"), *glob.glob("/opt/python/bin/python3*")]
        found = {{}}
        for python in (path for path in pythons if not path.endswith("-config")):
            for options in ([], ["-I"], ["-s"]):
                done = subprocess.run([python, *options, "-c", ask, *names], capture_output=True, text=True)
                found[" ".join([python, *options])] = done.stdout.strip() or done.stderr[-100:]
        places = [os.path.join(top, name) for top, directories, _ in os.walk("/opt")
                  for name in directories if name in names]
        places += glob.glob("/usr/lib*/python*/*-packages")
        report([found, places])
    """
    found, places = box.ask(dedent(program), timeout=60)
    # Without its environment the interpreter may have lost its libraries: then it finds nothing at all.
    assert {text for text in found.values() if "error while loading" not in text} == {"[]"}, found
    inner = [path for path in places if "-packages/" in path or f"/{_LIBRARY}/" in path]  # of other packages
    assert set(places) - set(inner) == {"/opt/fumehood", "/opt/fumehood/guest/fumehood"}
    top = f"{layout.VIRTUALENV}/lib/{_LIBRARY}/site-packages"
    assert not [path for path in inner if os.path.dirname(path) == top]


def test_proc_has_processes_only(box: SandboxClient) -> None:
    names = box.ask("report(os.listdir('/proc'))")
    assert [name for name in names if not name.isdigit()] in (
        ["self", "thread-self"],
        ["thread-self", "self"],
    )


WALK = """
    import stat
    accepted, refusals, seen, busy = [], {}, 0, set()
    token = f".attack-{os.getpid()}"
    for top, directories, files in os.walk("/", followlinks=False):
        if top.startswith("/proc/") or top.count("/") > 5:
            directories[:] = []
            continue
        seen += 1
        target = os.path.join(top, token)
        for make in (lambda: os.close(os.open(target, os.O_CREAT | os.O_WRONLY)), lambda: os.mkdir(target + "d"),
                     lambda: os.symlink("/", target + "l"), lambda: os.mknod(target + "p", stat.S_IFIFO | 0o600)):
            try:
                make()
                accepted.append(top)
            except OSError as error:
                refusals[name_of(error.errno)] = refusals.get(name_of(error.errno), 0) + 1
        for name in files[:3]:
            path = os.path.join(top, name)
            for change in (lambda: os.close(os.open(path, os.O_WRONLY)), lambda: os.chmod(path, 0o777),
                           lambda: os.truncate(path, 0), lambda: os.rename(path, path + "x"),
                           lambda: os.unlink(path), lambda: os.link(path, "/tmp/" + token + str(seen))):
                try:
                    if not os.path.islink(path) and not path.startswith(("/dev/", "/tmp/", "/proc/")):
                        change()
                        accepted.append(path)
                except OSError as error:
                    refusals[name_of(error.errno)] = refusals.get(name_of(error.errno), 0) + 1
                    if error.errno == errno.ETXTBSY: busy.add(path)
    changes = {path: [call(269, -100, path.encode(), os.W_OK), attempt(os.chmod, path, 0o777)] for path in busy}
    report([sorted(set(accepted)), refusals, seen, changes])
"""


def test_only_the_four_places_can_be_written(box: SandboxClient) -> None:
    accepted, refusals, seen, busy = box.ask(dedent(WALK), timeout=120)
    assert set(accepted) >= WRITABLE
    assert [path for path in accepted if not path.startswith(tuple(WRITABLE))] == []
    assert seen > 200
    # The last is said of the program that is init, before it is looked at whether it may be written: it may not.
    assert set(refusals) <= {"EROFS", "EACCES", "EPERM", "EXDEV", "ENOENT", "ETXTBSY"}
    assert set(busy) <= {layout.INIT_PROGRAM}
    assert {answer for answers in busy.values() for answer in answers} <= {"EROFS", "EACCES", "EPERM"}


PROC_FILES = """
    oom_score_adj oom_adj mem comm coredump_filter timerslack_ns uid_map gid_map projid_map setgroups loginuid
    clear_refs attr/current autogroup sched make-it-fail timens_offsets
"""


def test_proc_cannot_be_written(box: SandboxClient) -> None:
    program = """
        def write(path): os.write(os.open(path, os.O_WRONLY), b"0")
        report({name: attempt(write, f"/proc/{pid}/{name}") for name in NAMES.split() for pid in ("self", "1")})
    """
    answers = box.ask(f"NAMES = {PROC_FILES!r}\n" + dedent(program))
    assert set(answers.values()) <= {"EROFS", "EACCES", "EPERM", "ENOENT"}


def test_the_oom_preference_is_set_and_kept(box: SandboxClient) -> None:
    assert box.ask("report(int(open('/proc/self/oom_score_adj').read()))") >= 500


def test_hard_links_and_renames_do_not_leave_the_tmpfs(box: SandboxClient) -> None:
    program = """
        answers = [attempt(os.link, "/usr/bin/env", "/mnt/data/env"),
                   attempt(os.rename, "/mnt/data", "/mnt/elsewhere"),
                   attempt(os.rmdir, "/tmp"), attempt(os.unlink, "/dev/null"),
                   attempt(os.rename, "/etc/passwd", "/mnt/data/passwd")]
        report(answers)
    """
    for answer in box.ask(dedent(program)):
        assert answer in ("EXDEV", "EROFS", "EACCES", "EBUSY", "EPERM"), answer


def test_a_shared_device_node_cannot_be_changed(box: SandboxClient) -> None:
    """/dev/null is the host's own inode: neither its mode, owner nor attributes are the sandbox's to set."""
    program = """
        before = os.stat("/dev/null").st_mtime_ns
        answers = [attempt(os.chmod, "/dev/null", 0), attempt(os.chown, "/dev/null", 1000, 1000),
                   attempt(os.setxattr, "/dev/null", "user.a", b"b"), attempt(os.utime, "/dev/null", (1, 1))]
        report([answers, attempt(os.utime, "/dev/null"), os.stat("/dev/null").st_mtime_ns == before])
    """
    answers, touched, same = box.ask(dedent(program))
    assert set(answers) <= {"EPERM", "EROFS", "EACCES", "ENOTSUP"}
    assert same, f"the host's /dev/null was touched: {touched}"
