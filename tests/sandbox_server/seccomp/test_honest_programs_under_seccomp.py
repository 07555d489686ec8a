"""Honest programs work under the seccomp filters."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from fumehood.sandbox_server.seccomp import syscall_policy
from tests.support.seccomp_programs import live, run_under_filter

MP = """
import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor
def square(x): return x * x
if __name__ == "__main__":
    with ProcessPoolExecutor(2, mp_context=mp.get_context("{method}")) as pool:
        assert list(pool.map(square, range(20))) == [x * x for x in range(20)]
    lock, value = mp.Lock(), mp.Value("i", 3)
    with lock: assert value.value == 3
"""

WORK = {
    "fork": MP.format(method="fork"),
    "spawn": MP.format(method="spawn"),
    "forkserver": MP.format(method="forkserver"),
    "shared_memory": """
from multiprocessing.shared_memory import SharedMemory
block = SharedMemory(create=True, size=4096); block.buf[0] = 7; block.close(); block.unlink()
""",
    "threads": """
import threading, queue, time, concurrent.futures as f
with f.ThreadPoolExecutor(16) as pool: assert sum(pool.map(lambda x: x, range(1000))) == 499500
threading.stack_size(1 << 20); t = threading.Timer(0.01, lambda: None); t.start(); t.join()
""",
    "subprocess": """
import os, shutil, subprocess, sys
assert subprocess.run(["/bin/echo", "x"], capture_output=True, text=True).stdout == "x\\n"
assert subprocess.run("exit 3", shell=True, start_new_session=True, cwd="/").returncode == 3
assert os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)[1] == 0
try: subprocess.run(["sleep", "9"], timeout=0.05)
except subprocess.TimeoutExpired: pass
assert os.system("echo a | cat | grep -q a") == 0
fd = os.memfd_create("x", 0); os.write(fd, open("/bin/true", "rb").read())
assert subprocess.run([f"/proc/self/fd/{fd}"], pass_fds=[fd]).returncode == 0
""",
    "asyncio": """
import asyncio
async def main():
    p = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    assert (await p.communicate(b"hi"))[0] == b"hi"
    assert await asyncio.to_thread(lambda: 5) == 5
    await asyncio.gather(*[asyncio.sleep(0.001) for _ in range(50)])
asyncio.run(main())
""",
    "loopback": """
import asyncio, http.server, socket, threading, urllib.request
from multiprocessing.connection import Client, Listener
async def main():
    async def echo(r, w): w.write(await r.readline()); await w.drain(); w.close()
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    r, w = await asyncio.open_connection(*server.sockets[0].getsockname())
    w.write(b"x\\n"); assert await r.readline() == b"x\\n"; w.close(); server.close()
asyncio.run(main())
web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=web.serve_forever, daemon=True).start()
assert urllib.request.urlopen(f"http://127.0.0.1:{web.server_port}/").status == 200
with Listener(family="AF_UNIX") as listener:
    t = threading.Thread(target=lambda: Client(listener.address).send(1)); t.start()
    assert listener.accept().recv() == 1
try: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
except PermissionError: pass
else: raise AssertionError("UDP")
assert socket.getaddrinfo("localhost", 80)
""",
    "files": """
import fcntl, mmap, os, pathlib, select, shutil, tempfile, zipfile, tarfile
with tempfile.TemporaryDirectory() as d:
    a = pathlib.Path(d, "a"); a.write_bytes(b"x" * 100000); os.chmod(a, 0o640); os.utime(a, (1, 1))
    shutil.copy2(a, f"{d}/b"); shutil.copytree(d, f"{d}2"); shutil.move(f"{d}/b", f"{d}2/c")
    shutil.rmtree(f"{d}2")
    os.mkfifo(f"{d}/f"); os.symlink("a", f"{d}/l"); os.link(a, f"{d}/h"); os.stat(f"{d}/l")
    os.truncate(a, 9); os.posix_fallocate(os.open(a, os.O_RDWR), 0, 99)
    list(os.walk(d)); shutil.disk_usage(d)
    with open(a, "r+b") as f:
        fcntl.flock(f, fcntl.LOCK_EX); fcntl.lockf(f, fcntl.LOCK_EX)
        m = mmap.mmap(f.fileno(), 0); m[0] = 1; m.flush()
        m.madvise(mmap.MADV_DONTNEED); m.close(); os.fsync(f.fileno())
    with zipfile.ZipFile(f"{d}/z", "w") as z: z.write(a)
    with tarfile.open(f"{d}/t.gz", "w:gz") as t: t.add(a)
m = mmap.mmap(-1, 1 << 22); m.madvise(mmap.MADV_HUGEPAGE) if hasattr(mmap, "MADV_HUGEPAGE") else 0
r, w = os.pipe(); fcntl.fcntl(w, 1031, 1 << 16); select.epoll().register(r); os.isatty(r); os.sync()
""",
    "sqlite": """
import sqlite3
db = sqlite3.connect("w.db"); assert db.execute("pragma journal_mode=wal").fetchone()[0] == "wal"
db.execute("create table t(a)")
db.executemany("insert into t values(?)", [(i,) for i in range(999)]); db.commit()
assert sqlite3.connect("w.db").execute("select sum(a) from t").fetchone()[0] == 498501
""",
    "system": """
import ctypes, faulthandler, locale, os, platform, resource, signal, time, uuid, zoneinfo
resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))
os.sched_getaffinity(0); os.nice(1)
os.sched_setaffinity(0, os.sched_getaffinity(0)); os.setuid(os.getuid()); platform.platform(); os.cpu_count()
signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.05)
signal.pidfd_send_signal(os.pidfd_open(os.getpid()), 0); uuid.uuid4(); os.urandom(8)
""",
    "numpy": """
import numpy as n
a = n.random.rand(500, 500); n.linalg.inv(a) @ a; n.fft.fft(a); n.save("a", a); n.load("a.npy", mmap_mode="r")
""",
    "pandas": """
import pandas as p
d = p.DataFrame({"a": [1, 1, 2], "b": [1., 2, 3]}); d.groupby("a").b.mean(); d.to_csv("x"); p.read_csv("x")
""",
    "matplotlib": """
import matplotlib.pyplot as p
p.plot([1, 3, 2]); p.title("t"); p.savefig("x.png"); p.savefig("x.pdf")
""",
    "pyarrow": """
import pyarrow as a, pyarrow.parquet as q
q.write_table(a.table({"a": list(range(9999))}), "x"); q.read_table("x", memory_map=True)
""",
    "sklearn": """
from sklearn.cluster import KMeans
from sklearn.ensemble import RandomForestClassifier
import numpy as n
x = n.random.rand(400, 5); KMeans(3, n_init=2).fit(x)
RandomForestClassifier(20, n_jobs=2).fit(x, x[:, 0] > .5)
""",
    "polars": """
import polars as p
d = p.DataFrame({"a": [1, 1, 2]}); d.lazy().group_by("a").len().collect()
d.write_parquet("x"); p.scan_parquet("x").collect()
""",
    "duckdb": """
import duckdb
db = duckdb.connect("x.db"); db.sql("create table t as select range a from range(99999)")
db.sql("select sum(a) from t").fetchall(); db.sql("copy t to 'x.parquet'")
""",
    "joblib": """
from joblib import Parallel, delayed
import math
for backend in ("loky", "threading", "multiprocessing"):
    assert Parallel(2, backend=backend)(delayed(math.sqrt)(i * i) for i in range(9)) == list(range(9))
""",
}
# What needs sockets that a filter forbids: all, or those of INET. Spawn, loky and joblib's multiprocessing get by with
# pipes and pairs.
WITHOUT_SOCKETS = {"degraded": {"forkserver", "loopback"}, "pod": {"loopback"}}
LIBRARIES = {"numpy", "pandas", "matplotlib", "pyarrow", "sklearn", "polars", "duckdb", "joblib"}


# Libraries take long: test_library_compatibility.py tries them in a sandbox, with the filter `namespaces`, the slow
# tests under each filter alone.
TRIALS = [
    pytest.param(
        name,
        work,
        id=f"{name}-{work}",
        marks=[pytest.mark.slow] if work in LIBRARIES else [],
    )
    for name in syscall_policy.POLICY_OF_MODE.values()
    for work in WORK
]


@live
@pytest.mark.parametrize(("name", "work"), TRIALS)
def test_python_works(name: str, work: str, tmp_path: Path) -> None:
    if work in LIBRARIES and importlib.util.find_spec(work) is None:
        pytest.skip(f"{work} is not installed")
    script = tmp_path / "work.py"
    script.write_text(WORK[work])
    done = run_under_filter(name, sys.executable, str(script), cwd=tmp_path)
    if work in WITHOUT_SOCKETS.get(name, ()):
        assert done.returncode == 1, done.stderr
    else:
        assert done.returncode == 0, done.stderr


SHELL = {
    "bash": """
for i in 1 2 3; do echo $i & done | sort > o; wait; cat <(echo x) <<< y; trap 'echo t' EXIT; [[ -s o ]]
""",
    "git": """
git init -q r; cd r; git config user.email a@b; git config user.name a; echo x > f; git add f
git commit -qm m; git log | grep -q m; git gc -q; git clone -q . ../s
""",
    "tar": """
mkdir d; echo x > d/f; ln -s f d/l; tar cf - d | gzip > t.gz; rm -r d; tar xzf t.gz; test -e d/l
cp -a d e; cp --reflink=auto d/f g; mv e h; rm -rf h; find . | xargs ls -la > /dev/null; sync
""",
}


@live
@pytest.mark.parametrize("tool", SHELL)
@pytest.mark.parametrize("name", syscall_policy.POLICY_OF_MODE.values())
def test_tools_work(name: str, tool: str, tmp_path: Path) -> None:
    if shutil.which(tool) is None or (bash := shutil.which("bash")) is None:
        pytest.skip(f"no {tool}")
    done = run_under_filter(name, bash, "-euo", "pipefail", "-c", SHELL[tool], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
