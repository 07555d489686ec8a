"""Forks of the zygote share its memory, and programs do not notice."""

import subprocess
import sys

import pytest

from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.support.sandbox_runs import run, settings

IMMORTAL = """
import sys
from fumehood.sandbox_server.inside.warm_start import immortal_objects
held = [object() for _ in range(1000)]
def function(): return ("constant", 12345678901, held)
immortal_objects.make_objects_immortal()
count = lambda item: sys.getrefcount(item)
before = [count(held), count(function), count(function.__code__), count(function.__code__.co_consts[2])]
kept = [held] * 100, [function] * 100, [function.__code__] * 100
assert min(before) > 1 << 31, before
assert [count(held), count(function), count(function.__code__)] == before[:3]
fresh = []
assert count(fresh) < 10
del held, function, kept
print("ok")
"""
REMAP = """
import hashlib, json, random, sys
from fumehood.sandbox_server.inside.warm_start import file_backed_heap
random.seed(1)
before = {number: str(number) * 3 for number in range(20_000)}
memory = file_backed_heap.FileBackedHeap()
while_shared = [bytes([number % 256]) * random.randrange(1, 3000) for number in range(20_000)]
digest = hashlib.sha256(b"".join(while_shared)).hexdigest()
memory.make_private()
import os
child = os.fork()
if child == 0:
    for number in range(0, 20_000, 7):
        while_shared[number] = b"changed by the child"
    before.clear()
    os._exit(0 if hashlib.sha256(b"".join(while_shared)).hexdigest() != digest else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert hashlib.sha256(b"".join(while_shared)).hexdigest() == digest, "a child's writes reached its parent"
assert before == {number: str(number) * 3 for number in range(20_000)}
after = [bytearray(random.randrange(1, 200_000)) for _ in range(500)]
assert not any(any(item) for item in after[::50])
del while_shared, after
while_shared = json.dumps(list(range(100_000)))
maps = open("/proc/self/maps").read()
assert "memfd:zygote" in maps and " rw-s " not in maps
open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(64) if os.path.islink(f"/proc/self/fd/{fd}")]
assert not any("memfd" in name for name in open_files), open_files
print("ok")
"""
LIBRARIES = """
import os
from fumehood.sandbox_server.inside.warm_start import file_backed_heap
memory = file_backed_heap.FileBackedHeap()
import numpy
memory.make_private()
assert numpy.arange(6.0).reshape(2, 3).T.dot(numpy.ones(2)).tolist() == [3.0, 5.0, 7.0]
child = os.fork()
if child == 0:
    numpy.seterr(all="raise")
    numpy.set_printoptions(precision=1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert numpy.geterr()["invalid"] == "warn" and numpy.get_printoptions()["precision"] == 8
assert numpy.linalg.inv(numpy.eye(3)).sum() == 3.0
print("ok")
"""


@pytest.mark.parametrize("program", [IMMORTAL, REMAP, LIBRARIES], ids=["immortal", "shared", "libraries"])
def test_in_a_process_of_its_own(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


async def test_what_one_sandbox_changes_no_other_sees() -> None:
    """Writes to what was there before the fork, in Python's memory and in the C library's."""
    change = (
        "import pandas, numpy, json, os\n"
        "pandas.options.display.max_rows = 7\nnumpy.core_value = 'theirs'\njson.JSONEncoder.item_separator = '#'\n"
        "os.environ['LEFT'] = 'behind'\nint.__doc__ and None\n"
    )
    look = (
        "import pandas, numpy, json, os\n"
        "print(pandas.options.display.max_rows, hasattr(numpy, 'core_value'), json.JSONEncoder.item_separator, "
        "os.environ.get('LEFT'))"
    )
    async with Supervisor(settings()) as supervisor:
        first = await supervisor.create()
        assert (await run(first, change)).end.status == "ok"
        second = await supervisor.create()
        assert (await run(second, look)).stdout == "60 False ,  None\n"
        assert (await run(first, look)).stdout == "7 True # behind\n"


async def test_warm_up_programs_leave_nothing() -> None:
    async with Supervisor(settings()) as supervisor:
        sandbox = await supervisor.create()
        outcome = await run(
            sandbox,
            "import sys, linecache, builtins\n"
            "print(sorted(name for name in globals() if not name.startswith('__')))\n"
            "print(hasattr(sys, 'last_exc'), hasattr(builtins, '_'), [n for n in linecache.cache if 'cell' in n])\n"
            "import matplotlib.pyplot as plt\nprint(plt.get_fignums(), __name__, sys.argv)",
        )
        assert outcome.stdout == (
            "['builtins', 'linecache', 'sys']\nFalse False ['<cell 1>']\n[] __main__ ['']\n"
        )
