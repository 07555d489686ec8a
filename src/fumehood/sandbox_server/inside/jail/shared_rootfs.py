"""Builds the root file system that the zygote and all sandboxes share, then executes the spawner.

The host's directories are on the stage (see rootfs.py). Sandboxes get them as read-only overlays, not bind mounts: a
mask on top hides what does not belong there (packages that are not the sandbox's), and mountinfo shows neutral names
instead of the operator's paths.
"""

import errno
import os
from typing import NamedTuple, NoReturn

from fumehood.sandbox_server.inside import layout, syscalls
from fumehood.sandbox_server.inside.jail import rootfs
from fumehood.sandbox_server.inside.jail.rootfs import NEW_ROOT

_MASKS = "masks"
_SITE_OVERLAY = "site-overlay"
_BYTECODE = "bytecode"  # of the packages, if their installer wrote none
_PIP_SCRIPT = "#!{python}\nimport sys\n\nfrom pip import main\n\nsys.exit(main())\n"
_START_SPAWNER = (
    "import sys; sys.path.insert(0, {guest!r}); "
    "from fumehood.sandbox_server.inside.processes import jail_spawner; jail_spawner.main({fd})"
)
# Hints for errors of overlay mounts.
_OVERLAY_ERRORS = {
    errno.EPERM: " (overlays in user namespaces need Linux 5.11 or later)",
    errno.ENODEV: " (overlayfs is not loaded: as root, `modprobe overlay`)",
    errno.ELOOP: " (layers overlap)",
    errno.EINVAL: " (a file system here cannot be a layer, or overlays are stacked too deep)",
}
_ETC = {
    "passwd": "root:x:0:0:root:/root:/usr/sbin/nologin\n"
    f"user:x:{layout.USER_ID}:{layout.USER_ID}:user:{layout.HOME}:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": f"root:x:0:\nuser:x:{layout.USER_ID}:\nnogroup:x:65534:\n",
    "hosts": f"127.0.0.1 localhost {layout.HOSTNAME}\n::1 localhost\n",
    "hostname": f"{layout.HOSTNAME}\n",
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


class RootfsSources(NamedTuple):
    """The trees of which the root is built, besides `usr` and `guest` (the directory `inside` of this package).

    has_python: the interpreter is not the distribution's; its prefix is `python` on the stage.
    packages: package directories on the stage, and the names to show of each.
    roots: /lib, /bin and the like on the host: the target of a link into /usr, or None for a directory (`root-lib`).
    """

    version: str  # "3.12"
    library: str  # the name of the standard library's directory, "python3.12"
    executable: str  # the interpreter's file name
    has_python: bool
    packages: list[tuple[str, list[str]]]
    roots: dict[str, str | None]


def exec_spawner(control_fd: int, environ: dict[str, str]) -> NoReturn:
    """Execute the spawner in a new address space, with this environment only."""
    python = f"{layout.VIRTUALENV}/bin/python"
    source = _START_SPAWNER.format(guest=layout.GUEST_ROOT, fd=control_fd)
    os.execve(python, [python, "-c", source], environ)


def build_root(trees: RootfsSources) -> None:
    """Build the new root. Raises OSError if any part fails, since each part also hides something."""
    directories = (
        *("/etc", "/opt", "/proc", "/dev", "/mnt", "/home", layout.STAGING),
        *layout.WRITABLE,
        *(layout.ZYGOTE_CACHE, layout.ATTACHED_PACKAGES, layout.PACKAGE_LAYERS),
    )
    for path in directories:
        os.makedirs(NEW_ROOT + path, exist_ok=True)
    os.mkdir(_MASKS)
    _mount_overlay("/usr", [("usr", {"/local", "/src", *_system_packages()})])
    for name, link in trees.roots.items():
        if link is not None:
            os.symlink(link, NEW_ROOT + name)
        else:
            _mount_overlay(name, [(f"root-{name[1:]}", set())])
    if trees.has_python:
        _mount_overlay(layout.PYTHON_PREFIX, [("python", _hidden_beside_python(trees))])
    _create_virtualenv(trees)
    _mount_overlay(f"{layout.GUEST_ROOT}/fumehood/sandbox_server/inside", [("guest", set())])
    _write_etc()
    _install_init_program()
    rootfs.bind_devices()
    if os.path.isdir("layers"):
        # Read-only; the spawner hides it from sandboxes.
        rootfs.bind_mount("layers", layout.PACKAGE_LAYERS)
    rootfs.mount_proc()


def _system_packages() -> set[str]:
    """Return the distribution's Python package directories below /usr, which belong to the host."""
    return {
        f"/{library}/{name}/{packages}"
        for library in ("lib", "lib64")
        if os.path.isdir(f"usr/{library}") and not os.path.islink(f"usr/{library}")
        for name in os.listdir(f"usr/{library}")
        if name.startswith("python")
        for packages in ("site-packages", "dist-packages")
    }


def _hidden_beside_python(trees: RootfsSources) -> set[str]:
    """Return the paths in the interpreter's prefix that are not the interpreter."""
    prefix, library = "python", trees.library
    hidden = {f"/{name}" for name in os.listdir(prefix) if name not in ("bin", "lib", "lib64")}
    hidden |= {f"/bin/{name}" for name in os.listdir(f"{prefix}/bin") if name != trees.executable}
    for name in os.listdir(f"{prefix}/lib"):
        # Keep shared libraries: a relocatable build has its own OpenSSL and the like beside libpython.
        if name != library and ".so" not in name:
            hidden.add(f"/lib/{name}")
    for directory in ("lib", "lib64"):
        if not os.path.islink(f"{prefix}/{directory}"):
            hidden |= {f"/{directory}/{library}/{name}" for name in ("site-packages", "dist-packages")}
    return hidden


def _create_virtualenv(trees: RootfsSources) -> None:
    """Create a virtual environment with the sandbox's packages, so that subprocesses find them too."""
    home = f"{layout.PYTHON_PREFIX}/bin" if trees.has_python else "/usr/bin"
    binaries = f"{NEW_ROOT}{layout.VIRTUALENV}/bin"
    os.makedirs(binaries)
    for name in ("python", "python3", f"python{trees.version}"):
        os.symlink(f"{home}/{trees.executable}", f"{binaries}/{name}")
    with open(f"{NEW_ROOT}{layout.VIRTUALENV}/pyvenv.cfg", "w") as file:
        file.write(f"home = {home}\ninclude-system-site-packages = false\nversion = {trees.version}\n")
    for name in ("pip", "pip3"):
        with open(f"{binaries}/{name}", "w") as file:
            file.write(_PIP_SCRIPT.format(python=f"{layout.VIRTUALENV}/bin/python"))
            os.fchmod(file.fileno(), 0o755)
    _copy_tree("guest/site_overlay", _SITE_OVERLAY)  # fumehood's own modules among the sandbox's packages
    packages = [
        (tree, {f"/{name}" for name in os.listdir(tree) if name not in keep} | {"/pip"})
        for tree, keep in trees.packages
    ]
    upper_layers = (_SITE_OVERLAY, _BYTECODE) if os.path.isdir(_BYTECODE) else (_SITE_OVERLAY,)
    _mount_overlay(
        f"{layout.VIRTUALENV}/lib/{trees.library}/site-packages", packages, upper_layers=upper_layers
    )


def _copy_tree(source: str, target: str) -> None:
    """Copy a small tree: the source may lie in site-packages, and overlays refuse nested layers."""
    os.mkdir(target)
    for entry in os.scandir(source):
        if entry.is_dir():
            if entry.name != "__pycache__":
                _copy_tree(entry.path, f"{target}/{entry.name}")
            continue
        with open(entry.path, "rb") as original, open(f"{target}/{entry.name}", "wb") as copy:
            copy.write(original.read())


def _mount_overlay(
    target: str, trees: list[tuple[str, set[str]]], *, upper_layers: tuple[str, ...] = ()
) -> None:
    """Mount these trees read-only at `target`, each without its hidden paths; the first tree wins.

    upper_layers: further layers on top.
    There is no fallback: a bind mount would show what is hidden, and the host's paths in mountinfo.
    """
    os.makedirs(NEW_ROOT + target, exist_ok=True)
    layers = list(upper_layers)
    for tree, hidden in trees:
        layers += [_make_mask(tree, hidden), tree]
    if len(layers) == 1:
        layers.append(_make_mask("usr", set()))  # an overlay needs two layers
    flags = syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV
    try:  # relative names: mountinfo shows them as they are given
        syscalls.mount("sandbox", NEW_ROOT + target, "overlay", flags, f"lowerdir={':'.join(layers)}")
    except OSError as error:
        raise OSError(
            error.errno, f"{target}: {error.strerror}{_OVERLAY_ERRORS.get(error.errno or 0, '')}"
        ) from error


def _make_mask(tree: str, hidden: set[str]) -> str:
    """Return a layer that hides these paths of a tree."""
    mask = f"{_MASKS}/{len(os.listdir(_MASKS))}"
    os.mkdir(mask)
    for path in hidden:
        if os.path.lexists(tree + path):
            os.makedirs(os.path.dirname(mask + path), exist_ok=True)
            os.mknod(mask + path, 0o20000)  # character device 0:0 is an overlay's whiteout
    return mask


def _write_etc() -> None:
    for name, text in _ETC.items():
        with open(f"{NEW_ROOT}/etc/{name}", "w") as file:
            file.write(text)
    if os.path.isdir("alternatives"):  # Debian's awk, editor and others are links through here
        os.mkdir(f"{NEW_ROOT}/etc/alternatives")
        for entry in os.scandir("alternatives"):
            if entry.is_symlink() and os.readlink(entry.path).startswith("/usr/"):
                os.symlink(os.readlink(entry.path), f"{NEW_ROOT}/etc/alternatives/{entry.name}")
    if os.path.isfile("certificates"):
        with open("certificates", "rb") as source:
            bundle = source.read()
        os.makedirs(f"{NEW_ROOT}/etc/ssl/certs")
        with open(f"{NEW_ROOT}/etc/ssl/certs/ca-certificates.crt", "wb") as file:
            file.write(bundle)
        os.symlink("certs/ca-certificates.crt", f"{NEW_ROOT}/etc/ssl/cert.pem")


def _install_init_program() -> None:
    """Copy the init program to where it is executable, whatever mode it was installed with."""
    try:
        with open(f"guest/init.{os.uname().machine}", "rb") as source:
            program = source.read()
    except FileNotFoundError:
        return
    with open(NEW_ROOT + layout.INIT_PROGRAM, "wb") as file:
        file.write(program)
        os.fchmod(file.fileno(), 0o755)
