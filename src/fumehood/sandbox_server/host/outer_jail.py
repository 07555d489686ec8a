"""The program that becomes the outer jail of a zygote or of the package installer.

It is executed with a fresh environment: nothing of the supervisor's memory, open files or variables reaches the
process that sandboxes are forked from. It reads its configuration from a pipe, which no other process can see, and
which the supervisor writes once the process is in its cgroup.

As root it first drops to an ordinary user. It creates the namespaces and forks: the child is process 1 of the jail,
builds its root and executes the program; the parent waits. Both end with the supervisor. If a step fails, it exits
with one line on standard error that names the step.
"""

import contextlib
import json
import os
import resource
import signal
import stat
from collections.abc import Generator
from typing import Any, NoReturn

from fumehood.sandbox_server.inside import layout, syscalls
from fumehood.sandbox_server.inside.jail import rootfs, shared_rootfs
from fumehood.sandbox_server.inside.processes import fork_server

FAILURE_PREFIX = "The jail could not be made: "
_FAILURE_EXIT_CODE = 125
_STAGING_DIRECTORIES = ("/mnt", "/media", "/srv", "/opt")
_NAMESPACES = (
    os.CLONE_NEWUSER
    | os.CLONE_NEWNS
    | os.CLONE_NEWPID
    | os.CLONE_NEWIPC
    | os.CLONE_NEWUTS
    | os.CLONE_NEWCGROUP
)


def main(configuration: int) -> NoReturn:
    """configuration: the pipe; if it is empty, the supervisor has ended."""
    try:
        with open(configuration, "rb") as pipe:
            body = pipe.read()
        if body:
            _run(json.loads(body))
    except OSError as error:
        _exit_with_error(error)
    os._exit(_FAILURE_EXIT_CODE)


def _run(config: dict[str, Any]) -> NoReturn:
    os.umask(0o022)
    mounts: dict[str, str] = config["mounts"]
    if config["uid"] is not None:
        try:
            with _describe_failure("mount what the jail is made of, as root"):
                mounts = _stage_mounts(mounts)
        except PermissionError:
            # Mode unsafe-degraded as root without the right to mount, as in most containers. It sees the host's
            # files anyway: those that all users may read still work.
            if config["kind"] != "bare":
                raise
        with _describe_failure("drop root"):
            _drop_root(config["uid"])
    if config["kind"] == "bare":
        _exec_bare(config, mounts)
    _create_jail(config, mounts)


@contextlib.contextmanager
def _describe_failure(what: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise type(error)(error.errno, f"{what}: {reason}") from error


def _exit_with_error(error: OSError) -> NoReturn:
    os.write(2, f"{FAILURE_PREFIX}{error.strerror or error}\n".encode(errors="backslashreplace"))
    os._exit(_FAILURE_EXIT_CODE)


def _stage_mounts(mounts: dict[str, str]) -> dict[str, str]:
    """Bind the trees to paths that an ordinary user can reach, unlike those below /root."""
    os.unshare(os.CLONE_NEWNS)
    syscalls.mount("none", "/", None, syscalls.MS_PRIVATE | syscalls.MS_REC)
    # Before the staging directory covers any of them.
    trees = {name: syscalls.clone_mount(path) for name, path in mounts.items()}
    stage = next((path for path in _STAGING_DIRECTORIES if os.path.isdir(path)), None)
    if stage is None:
        raise OSError(f"none of {', '.join(_STAGING_DIRECTORIES)} exists to put things together in")
    syscalls.mount("stage", stage, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=0755")
    staged: dict[str, str] = {}
    for name, tree in trees.items():
        staged[name] = f"{stage}/{name}"
        # By descriptor: the staging directory may cover the path.
        rootfs.make_mount_point(staged[name], is_directory=stat.S_ISDIR(os.fstat(tree).st_mode))
        syscalls.attach_mount(tree, staged[name])
        os.close(tree)
    return staged


def _drop_root(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


# ---- with namespaces ------------------------------------------------------------------------------------------


def _create_jail(config: dict[str, Any], mounts: dict[str, str]) -> NoReturn:
    uid, gid = os.getuid(), os.getgid()
    network = os.CLONE_NEWNET if config["kind"] == "zygote" else 0
    with _describe_failure("make namespaces"):
        os.unshare(_NAMESPACES | network)
    with _describe_failure("map users"):
        if config["unshared"] is not None:
            os.write(config["unshared"], b"1")
            if not os.read(config["mapped"], 1):
                os._exit(_FAILURE_EXIT_CODE)  # the supervisor failed to, and reports it
        else:
            _map_own_user(config["user"], uid, gid)
    syscalls.set_process_name("fumehood-jail")
    _die_with_parent()
    if os.getppid() != config["parent"]:
        os._exit(_FAILURE_EXIT_CODE)
    watched, held = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(held)
        _run_as_init(config, mounts, watched)
    fork_server.close_other_fds([held])
    syscalls.drop_all_privileges()
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _map_own_user(inside: int, uid: int, gid: int) -> None:
    """Map the only uid that an ordinary user may map without help: its own."""
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # otherwise /proc/self belongs to root after a change of uid
    for name, line in (
        ("setgroups", "deny"),
        ("gid_map", f"{inside} {gid} 1"),
        ("uid_map", f"{inside} {uid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def _die_with_parent() -> None:
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)


def _run_as_init(config: dict[str, Any], mounts: dict[str, str], parent: int) -> NoReturn:
    """Process 1 of the jail; the parent holds the other end of the pipe `parent`."""
    try:
        _die_with_parent()
        os.set_blocking(parent, False)
        with contextlib.suppress(BlockingIOError):
            os.read(parent, 1)
            os._exit(_FAILURE_EXIT_CODE)  # it ended before PDEATHSIG was set
        if config["kind"] == "zygote":
            _exec_zygote(config, mounts)
        _exec_program(config, mounts)
    except OSError as error:
        _exit_with_error(error)
    except BaseException as error:  # a traceback needs modules that are out of reach by now
        os.write(2, f"{FAILURE_PREFIX}{type(error).__name__}: {error}\n".encode(errors="backslashreplace"))
    os._exit(_FAILURE_EXIT_CODE)


def _exec_zygote(config: dict[str, Any], mounts: dict[str, str]) -> NoReturn:
    with _describe_failure("set the host name"):
        syscalls.set_hostname(layout.HOSTNAME)
    with _describe_failure("mount what the jail is made of"):
        rootfs.mount_stage(mounts)
    with _describe_failure("lay out the files of sandboxes"):
        shared_rootfs.build_root(shared_rootfs.RootfsSources(**config["host_trees"]))
    with _describe_failure("enter the new root"):
        rootfs.pivot_into_new_root()
    control: int = config["control"]
    with _describe_failure("give up descriptors and privileges"):
        fork_server.close_other_fds([control])
        os.set_inheritable(control, True)
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    with _describe_failure("start the spawner"):
        shared_rootfs.exec_spawner(control, config["environ"])


def _exec_program(config: dict[str, Any], mounts: dict[str, str]) -> NoReturn:
    """Execute another program without capabilities in the root that the configuration describes.

    Secrets are passed in this process's environment, not in the configuration.
    """
    with _describe_failure("set the host name"):
        syscalls.set_hostname(config["hostname"])
    with _describe_failure("mount what the jail is made of"):
        rootfs.mount_stage(mounts, writable=frozenset(config["writable"]))
    with _describe_failure("lay out the files of the jail"):
        _create_layout(config)
    with _describe_failure("enter the new root"):
        rootfs.pivot_into_new_root()
        rootfs.remount_with_flags("/", syscalls.MS_RDONLY)
    with _describe_failure("give up descriptors and privileges"):
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")  # nobody is left who could raise it again
        rootfs.remount_with_flags("/proc", syscalls.MS_RDONLY | syscalls.MS_NOEXEC)
        fork_server.close_other_fds([])
        syscalls.drop_all_privileges()
        resource.setrlimit(resource.RLIMIT_FSIZE, (config["file_bytes"], config["file_bytes"]))
    arguments: list[str] = config["arguments"]
    with _describe_failure(f"start {arguments[0]}"):
        os.execve(arguments[0], arguments, {**os.environ, **config["environ"]})


def _create_layout(config: dict[str, Any]) -> None:
    for path in ("/dev", "/tmp", *config["directories"]):
        os.makedirs(rootfs.NEW_ROOT + path, exist_ok=True)
    for name, target in config["binds"].items():
        rootfs.bind_mount(name, target)
    for path, target in config["links"].items():
        os.makedirs(os.path.dirname(rootfs.NEW_ROOT + path), exist_ok=True)
        os.symlink(target, rootfs.NEW_ROOT + path)
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
    syscalls.mount("tmp", f"{rootfs.NEW_ROOT}/tmp", "tmpfs", flags, "mode=0755")
    rootfs.bind_devices()
    rootfs.mount_proc()


# ---- without namespaces ---------------------------------------------------------------------------------------


def _exec_bare(config: dict[str, Any], mounts: dict[str, str]) -> NoReturn:
    """Execute the zygote directly, from the host's own files."""
    packages = [mounts[name] for name in config["packages"]]
    source = (
        f"import sys; sys.path.insert(0, {mounts['guest']!r}); sys.path.extend({packages!r}); "
        "from fumehood.sandbox_server.inside.processes import zygote_without_namespaces; "
        f"zygote_without_namespaces.main({config['control']})"
    )
    environ: dict[str, str] = {**config["environ"], "PYTHONPATH": ":".join(packages)}
    python: str = config["executable"]
    if "python" in mounts:
        python = f"{mounts['python']}/bin/{os.path.basename(python)}"
        environ["LD_LIBRARY_PATH"] = f"{mounts['python']}/lib"
    environ["PATH"] = f"{os.path.dirname(python)}:/usr/bin:/bin"
    fork_server.close_other_fds([config["control"]])
    os.set_inheritable(config["control"], True)
    with _describe_failure("start the zygote"):
        os.execve(python, [python, "-c", source], environ)
