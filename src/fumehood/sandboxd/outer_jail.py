"""Becomes the zygote's outer jail: stages trees, drops root, starts bubblewrap; imports only the standard library.

A program of its own, executed with an empty environment: nothing of the supervisor's memory, open files or
variables is carried into the process from which sandboxes are forked. It is given to the interpreter by path
and must not import the rest of the package.
"""

import ctypes
import json
import os
import resource
import sys
from typing import Any, NoReturn

_MS_NOSUID_NODEV = 2 | 4
_MS_BIND_REC = 4096 | 16384
_MS_PRIVATE_REC = (1 << 18) | 16384
_STAGES = ("/mnt", "/media", "/srv", "/opt")
_START = (
    "import sys; sys.path.insert(0, '/guest'); from fumehood.sandboxd.inside import boot; "
    "boot.main(sys.argv[1], int(sys.argv[2]))"
)


def main(config: dict[str, Any]) -> NoReturn:
    os.read(config["gate"], 1)  # the supervisor has put this process into its cgroup by now
    os.close(config["gate"])
    places: dict[str, str] = config["places"]
    if config["drop_to"] is not None:
        try:
            places = _stage(places)
        except PermissionError:
            # Root without the right to mount, as in most containers: what is readable for all still works.
            if config["bubblewrap"] is not None:
                raise
        _drop(config["drop_to"])
    if "arguments" in config:
        _exec_other(config, places)
    if config["bubblewrap"] is None:
        _exec_bare(config, places)
    _exec_jailed(config, places)


def _stage(places: dict[str, str]) -> dict[str, str]:
    """Give the trees names that an unprivileged user can reach: parents such as /root are closed to it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
        names = (source.encode(), target.encode(), kind.encode() if kind else None)
        if libc.mount(*names, ctypes.c_ulong(flags), options.encode()):
            number = ctypes.get_errno()
            raise OSError(number, f"mount {target}: {os.strerror(number)}")

    os.unshare(os.CLONE_NEWNS)
    mount("none", "/", None, _MS_PRIVATE_REC)
    # By descriptor, since the stage may cover a place; opened here, since only this namespace's can be bound.
    anchors = {name: os.open(path, os.O_PATH | os.O_CLOEXEC) for name, path in places.items()}
    stage = next((path for path in _STAGES if os.path.isdir(path)), None)
    if stage is None:
        raise OSError(f"none of {', '.join(_STAGES)} exists to put things together in")
    mount("stage", stage, "tmpfs", _MS_NOSUID_NODEV, "mode=0755")
    staged: dict[str, str] = {}
    for name, anchor in anchors.items():
        staged[name] = f"{stage}/{name}"
        if os.path.isdir(f"/proc/self/fd/{anchor}"):
            os.mkdir(staged[name])
        else:
            os.close(os.open(staged[name], os.O_CREAT | os.O_WRONLY, 0o644))
        mount(f"/proc/self/fd/{anchor}", staged[name], None, _MS_BIND_REC)
        os.close(anchor)
    return staged


def _drop(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.umask(0o022)


def _keep(*fds: int | None) -> None:
    for fd in fds:
        if fd is not None:
            os.set_inheritable(fd, True)


def _exec_jailed(config: dict[str, Any], places: dict[str, str]) -> NoReturn:
    arguments = [
        "bwrap",
        *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"),
        *("--unshare-cgroup-try", "--as-pid-1", "--die-with-parent", "--cap-add", "ALL"),
        *("--uid", "0", "--gid", "0", "--ro-bind", "/usr", "/usr"),
    ]
    for name, link in config["trees"]["roots"].items():
        arguments += ["--ro-bind", name, name] if link is None else ["--symlink", link, name]
    for name, inside in config["binds"].items():
        arguments += ["--ro-bind", places[name], inside]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--chdir", "/"]
    for name, value in config["environ"].items():
        arguments += ["--setenv", name, value]
    if config["info"] is not None:
        arguments += ["--userns-block-fd", str(config["block"]), "--info-fd", str(config["info"])]
    trees, control = json.dumps(config["trees"]), config["control"]
    arguments += ["--", config["executable"], "-I", "-S", "-c", _START, trees, str(control)]
    _keep(control, config["info"], config["block"])
    program: str = places["bubblewrap"] + config["bubblewrap"]
    os.execve(program, arguments, {})


def _exec_other(config: dict[str, Any], places: dict[str, str]) -> NoReturn:
    """Another program than the zygote, in a jail of the caller's description: [name, rest] is below a place.

    It gets this program's own environment, since what is secret must not stand on a command line.
    """
    arguments = [
        item if isinstance(item, str) else places[item[0]] + item[1]  # as bubblewrap will find it
        for item in config["arguments"]
    ]
    resource.setrlimit(resource.RLIMIT_FSIZE, (config["file_bytes"], config["file_bytes"]))
    os.execv(places["bubblewrap"] + config["bubblewrap"], ["bwrap", *arguments])


def _exec_bare(config: dict[str, Any], places: dict[str, str]) -> NoReturn:
    """Without namespaces: the zygote straight away, from the host's own trees."""
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
    _keep(config["control"])
    os.execve(python, [python, "-c", source], environ)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
