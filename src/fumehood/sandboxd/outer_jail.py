"""Becomes an outer jail, of a zygote or of the package installer; imports only the standard library and `inside`.

A program of its own, executed with an environment that the supervisor chose: nothing of the supervisor's memory,
open files or variables is carried into the process from which sandboxes are forked. It reads its configuration from
a pipe, where no other process can see it, and only once the supervisor has put it into its cgroup.

As root it drops to an ordinary user before anything else. It makes the namespaces and forks: the child is process 1
of the jail, builds its root and executes the program; this process waits, and both end with the supervisor. A step
that fails ends it with one line on standard error that names the step.
"""

import contextlib
import json
import os
import resource
import signal
import stat
from collections.abc import Generator
from typing import Any, NoReturn

from fumehood.sandboxd.inside import boot, children, filters, layout, roots, syscalls

FAILED = "The jail could not be made: "  # how the line begins that tells of a step that failed
_FAILED_CODE = 125
_STAGES = ("/mnt", "/media", "/srv", "/opt")
_NAMESPACES = (
    os.CLONE_NEWUSER
    | os.CLONE_NEWNS
    | os.CLONE_NEWPID
    | os.CLONE_NEWIPC
    | os.CLONE_NEWUTS
    | os.CLONE_NEWCGROUP
)


def main(configuration: int) -> NoReturn:
    """configuration: the pipe; one that ends without any means that the supervisor has gone."""
    try:
        with open(configuration, "rb") as pipe:
            body = pipe.read()
        if body:
            _start(json.loads(body))
    except OSError as error:
        _fail(error)
    os._exit(_FAILED_CODE)


def _start(config: dict[str, Any]) -> NoReturn:
    os.umask(0o022)
    places: dict[str, str] = config["places"]
    if config["drop_to"] is not None:
        try:
            with _step("mount what the jail is made of, as root"):
                places = _stage(places)
        except PermissionError:
            # Mode unsafe-degraded as root without the right to mount, as in most containers. It shows the host's
            # files anyway: what all users may read still works.
            if config["kind"] != "bare":
                raise
        with _step("drop root"):
            _drop(config["drop_to"])
    if config["kind"] == "bare":
        _exec_bare(config, places)
    _make_jail(config, places)


@contextlib.contextmanager
def _step(what: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise type(error)(error.errno, f"{what}: {reason}") from error


def _fail(error: OSError) -> NoReturn:
    os.write(2, f"{FAILED}{error.strerror or error}\n".encode(errors="backslashreplace"))
    os._exit(_FAILED_CODE)


def _stage(places: dict[str, str]) -> dict[str, str]:
    """Give the trees names that an ordinary user can reach: parents such as /root are closed to it."""
    os.unshare(os.CLONE_NEWNS)
    syscalls.mount("none", "/", None, syscalls.MS_PRIVATE | syscalls.MS_REC)
    # Before the stage covers any of them.
    trees = {name: syscalls.clone_mount(path) for name, path in places.items()}
    stage = next((path for path in _STAGES if os.path.isdir(path)), None)
    if stage is None:
        raise OSError(f"none of {', '.join(_STAGES)} exists to put things together in")
    syscalls.mount("stage", stage, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=0755")
    staged: dict[str, str] = {}
    for name, tree in trees.items():
        staged[name] = f"{stage}/{name}"
        # What was opened is asked: by now the stage may cover where it lies.
        roots.make_place(staged[name], is_directory=stat.S_ISDIR(os.fstat(tree).st_mode))
        syscalls.attach_mount(tree, staged[name])
        os.close(tree)
    return staged


def _drop(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


# ---- with namespaces ------------------------------------------------------------------------------------------


def _make_jail(config: dict[str, Any], places: dict[str, str]) -> NoReturn:
    uid, gid = os.getuid(), os.getgid()
    network = os.CLONE_NEWNET if config["kind"] == "zygote" else 0
    with _step("make namespaces"):
        os.unshare(_NAMESPACES | network)
    with _step("map users"):
        if config["unshared"] is not None:
            os.write(config["unshared"], b"1")
            if not os.read(config["mapped"], 1):
                os._exit(_FAILED_CODE)  # the supervisor could not, and knows it
        else:
            _map_own_user(config["user"], uid, gid)
    syscalls.set_process_name("fumehood-jail")
    _end_with_parent()
    if os.getppid() != config["parent"]:
        os._exit(_FAILED_CODE)
    watched, held = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(held)
        _be_process_one(config, places, watched)
    children.only_these_fds([held])
    _renounce()
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _map_own_user(inside: int, uid: int, gid: int) -> None:
    """The one user that an ordinary user may map without help: itself."""
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root after a change of user
    for name, line in (
        ("setgroups", "deny"),
        ("gid_map", f"{inside} {gid} 1"),
        ("uid_map", f"{inside} {uid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def _end_with_parent() -> None:
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)


def _renounce() -> None:
    syscalls.drop_all_capabilities()
    filters.forbid_new_privileges()


def _be_process_one(config: dict[str, Any], places: dict[str, str], parent: int) -> NoReturn:
    """Process 1 of the jail; `parent` is a pipe whose other end its parent holds."""
    try:
        _end_with_parent()
        os.set_blocking(parent, False)
        with contextlib.suppress(BlockingIOError):
            os.read(parent, 1)
            os._exit(_FAILED_CODE)  # it had ended before it was asked for a signal
        if config["kind"] == "zygote":
            _exec_zygote(config, places)
        _exec_program(config, places)
    except OSError as error:
        _fail(error)
    except BaseException as error:  # the modules that a traceback needs are out of reach by now
        os.write(2, f"{FAILED}{type(error).__name__}: {error}\n".encode(errors="backslashreplace"))
    os._exit(_FAILED_CODE)


def _exec_zygote(config: dict[str, Any], places: dict[str, str]) -> NoReturn:
    with _step("set the host name"):
        syscalls.set_hostname(layout.HOSTNAME)
    with _step("mount what the jail is made of"):
        roots.open_stage(places)
    with _step("lay out the files of sandboxes"):
        boot.lay_out(boot.Trees(**config["trees"]))
    with _step("enter the new root"):
        roots.enter()
    control: int = config["control"]
    with _step("give up descriptors and privileges"):
        children.only_these_fds([control])
        os.set_inheritable(control, True)
        filters.forbid_new_privileges()
    with _step("start the warden"):
        boot.exec_warden(control, config["environ"])


def _exec_program(config: dict[str, Any], places: dict[str, str]) -> NoReturn:
    """Another program, without capabilities, in a root of the caller's description.

    It gets this program's own environment, since what is secret must not stand where others can read it.
    """
    with _step("set the host name"):
        syscalls.set_hostname(config["hostname"])
    with _step("mount what the jail is made of"):
        roots.open_stage(places, writable=frozenset(config["writable"]))
    with _step("lay out the files of the jail"):
        _lay_out(config)
    with _step("enter the new root"):
        roots.enter()
        roots.protect("/", syscalls.MS_RDONLY)
    with _step("give up descriptors and privileges"):
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")  # of this one, and nobody is left who could raise it
        roots.protect("/proc", syscalls.MS_RDONLY | syscalls.MS_NOEXEC)
        children.only_these_fds([])
        _renounce()
        resource.setrlimit(resource.RLIMIT_FSIZE, (config["file_bytes"], config["file_bytes"]))
    arguments: list[str] = config["arguments"]
    with _step(f"start {arguments[0]}"):
        os.execve(arguments[0], arguments, {**os.environ, **config["environ"]})


def _lay_out(config: dict[str, Any]) -> None:
    for path in ("/dev", "/tmp", *config["directories"]):
        os.makedirs(roots.NEW + path, exist_ok=True)
    for name, target in config["binds"].items():
        roots.bind(name, target)
    for path, target in config["links"].items():
        os.makedirs(os.path.dirname(roots.NEW + path), exist_ok=True)
        os.symlink(target, roots.NEW + path)
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
    syscalls.mount("tmp", f"{roots.NEW}/tmp", "tmpfs", flags, "mode=0755")
    roots.add_devices()
    roots.add_proc()


# ---- without namespaces ---------------------------------------------------------------------------------------


def _exec_bare(config: dict[str, Any], places: dict[str, str]) -> NoReturn:
    """The zygote straight away, from the host's own trees."""
    packages = [places[name] for name in config["packages"]]
    source = (
        f"import sys; sys.path.insert(0, {places['guest']!r}); sys.path.extend({packages!r}); "
        f"from fumehood.sandboxd.inside import bare; bare.main({config['control']})"
    )
    environ: dict[str, str] = {**config["environ"], "PYTHONPATH": ":".join(packages)}
    python: str = config["executable"]
    if "python" in places:
        python = f"{places['python']}/bin/{os.path.basename(python)}"
        environ["LD_LIBRARY_PATH"] = f"{places['python']}/lib"
    environ["PATH"] = f"{os.path.dirname(python)}:/usr/bin:/bin"
    children.only_these_fds([config["control"]])
    os.set_inheritable(config["control"], True)
    with _step("start the zygote"):
        os.execve(python, [python, "-c", source], environ)
