"""Paths, ports and environment of a sandbox, shared by the jail and the supervisor."""

import os

# The directory from which this package is imported: in the jail, or on the host in modes without namespaces.
IMPORT_ROOT = os.path.dirname(__file__).removesuffix("/fumehood/sandbox_server/inside")

PYTHON_PREFIX = "/opt/python"  # prefix of the interpreter, unless it is the distribution's under /usr
VIRTUALENV = "/opt/sandbox"  # the virtual environment of user code
GUEST_ROOT = "/opt/fumehood/guest"  # this package; for the zygote and the runner only
ATTACHED_PACKAGES = "/opt/packages"  # empty until a package layer is attached
INIT_PROGRAM = "/opt/fumehood/init"  # the program of PID 1, if this architecture has one
PACKAGE_LAYERS = "/opt/fumehood/layers"  # all package layers; for the package helper only
ZYGOTE_CACHE = "/opt/fumehood/cache"  # files that the zygote prepares: matplotlib's font list
MATPLOTLIB_CONFIG = "/home/user/.config/matplotlib"  # must be writable; links to the cache
DATA_DIRECTORY = "/mnt/data"
TEMPORARY_DIRECTORY = "/tmp"
HOME = "/home/user"
SHARED_MEMORY = "/dev/shm"
WRITABLE = (DATA_DIRECTORY, TEMPORARY_DIRECTORY, HOME, SHARED_MEMORY)
READ_ONLY = ("/",)  # everything mounted there was put there for the sandbox
POD_READ_ONLY = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/opt", "/etc", "/proc", "/dev")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
STAGING = "/run"  # empty before and after; mounts are assembled here

EGRESS_PORT = 3128  # on the sandbox's loopback; the egress proxy accepts there, or nobody
CA_BUNDLE = "/home/user/.fumehood/ca.pem"  # only if there are more authorities than the system's
SYSTEM_CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"

USER_ID = 1000  # as the code sees itself
HOSTNAME = "sandbox"
PIP_PORT = 3129  # on loopback; `pip` in the sandbox sends its requests there
PIP_SOCKET = "/home/user/.fumehood/pip.sock"  # instead, in a pod

ENVIRON = {
    "HOME": HOME,
    "USER": "user",
    "LOGNAME": "user",
    "PATH": f"{VIRTUALENV}/bin:{ATTACHED_PACKAGES}/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "TMPDIR": TEMPORARY_DIRECTORY,
    "OUTPUT_DIR": DATA_DIRECTORY,
    "MPLBACKEND": "Agg",
    "MPLCONFIGDIR": ZYGOTE_CACHE,
    # One thread per BLAS call: threads started before the fork would be lost in it, and a sandbox has only a share
    # of the machine.
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # else pyarrow's allocator starts a thread on import
    # pyarrow's default pool reserves a gigabyte at once, which counts against the sandbox.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "PYTHONDONTWRITEBYTECODE": "1",
}
