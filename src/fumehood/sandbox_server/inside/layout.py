"""Where things lie inside a sandbox, told once for boot, jail and supervisor."""

import os

# The directory that this package is imported from, in the jail and, without namespaces, on the host.
IMPORT_ROOT = os.path.dirname(__file__).removesuffix("/fumehood/sandbox_server/inside")

PYTHON_PREFIX = "/opt/python"  # the interpreter's home, unless it is the distribution's own under /usr
VIRTUALENV = "/opt/sandbox"  # the virtual environment that user code sees
GUEST_ROOT = "/opt/fumehood/guest"  # this package, for the zygote and the runner only
ATTACHED_PACKAGES = "/opt/packages"  # empty, until a layer of further packages is attached
INIT_PROGRAM = "/opt/fumehood/init"  # the program that is process 1, where there is one for this machine
PACKAGE_LAYERS = "/opt/fumehood/layers"  # all such layers, for the zygote's helper only
ZYGOTE_CACHE = "/opt/fumehood/cache"  # what the zygote prepares at start: matplotlib's font list
MATPLOTLIB_CONFIG = "/home/user/.config/matplotlib"  # wants to be writable; refers to the cache
DATA_DIRECTORY = "/mnt/data"
TEMPORARY_DIRECTORY = "/tmp"
HOME = "/home/user"
SHARED_MEMORY = "/dev/shm"
WRITABLE = (DATA_DIRECTORY, TEMPORARY_DIRECTORY, HOME, SHARED_MEMORY)
READ_ONLY = ("/",)  # all that is mounted there was put there for the sandbox
POD_READ_ONLY = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/opt", "/etc", "/proc", "/dev")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
STAGING = "/run"  # empty before and after; mounts are put together here

EGRESS_PORT = 3128  # of the sandbox's own loopback; the supervisor's proxy accepts there, or nobody
CA_BUNDLE = "/home/user/.fumehood/ca.pem"  # certificate authorities, where there are more than the system's
SYSTEM_CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"

USER_ID = 1000  # what the code believes itself to be
HOSTNAME = "sandbox"
PIP_PORT = 3129  # on loopback: where `pip` inside asks the supervisor

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
    # One thread per BLAS call: threads made before the fork would be lost in it, and a sandbox has a share of a
    # machine, not the machine.
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's allocator would start a thread on import
    # pyarrow's usual one reserves a gigabyte at once, which a sandbox is charged for.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "PYTHONDONTWRITEBYTECODE": "1",
}
