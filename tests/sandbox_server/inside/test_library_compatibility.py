"""Common libraries work in a sandbox: data packages, threads, processes, databases."""

import textwrap
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.support.sandbox_runs import run, settings

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[SandboxInstance]:
    async with Supervisor(settings()) as supervisor:
        yield await supervisor.create()


CASES: dict[str, tuple[str, str]] = {  # name: (repr of the last expression, program)
    "numpy": (
        "(np.float64(25.0), [4.0, 0.0, 0.0, 0.0])",
        """
        import numpy as np
        np.linalg.inv(np.eye(50) * 2).sum(), np.fft.fft(np.ones(4)).real.tolist()
        """,
    ),
    "numpy large product": (
        "(400, 400)",
        """
        import numpy as np
        a = np.random.rand(400, 400)
        (a @ a).shape
        """,
    ),
    "pandas": (
        "{'a': 3, 'b': 3}",
        """
        import pandas as pd
        pd.DataFrame({'k': list('aab'), 'v': [1, 2, 3]}).groupby('k').v.sum().to_dict()
        """,
    ),
    "pandas strings": (
        "['A', 'B', nan]",
        """
        import pandas as pd
        pd.Series(['a', 'b', None]).str.upper().tolist()
        """,
    ),
    "pandas excel": (
        "(1, 2)",
        """
        import pandas as pd
        pd.DataFrame({'a': [1]}).to_excel('t.xlsx')
        pd.read_excel('t.xlsx').shape
        """,
    ),
    "pyarrow": (
        "1000",
        """
        import pyarrow as pa
        import pyarrow.parquet as pq
        pq.write_table(pa.table({'a': range(1000)}), 't.parquet')
        pq.read_table('t.parquet').num_rows
        """,
    ),
    "pyarrow compute": (
        "39600",
        """
        import pyarrow as pa
        import pyarrow.compute as pc
        pc.sum(pa.chunked_array([list(range(100))] * 8)).as_py()
        """,
    ),
    "matplotlib": (
        "True",
        """
        import matplotlib.pyplot as plt
        plt.plot([1, 2])
        plt.savefig('c.png')
        plt.close()
        import os
        os.path.getsize('c.png') > 1000
        """,
    ),
    "sklearn": (
        "True",
        """
        from sklearn.cluster import KMeans
        import numpy as np
        KMeans(2, n_init=2).fit(np.random.rand(300, 3)).n_iter_ > 0
        """,
    ),
    "sklearn jobs": (
        "[1]",
        """
        from sklearn.ensemble import RandomForestClassifier
        RandomForestClassifier(8, n_jobs=2).fit([[0], [1]] * 20, [0, 1] * 20).predict([[1]]).tolist()
        """,
    ),
    "joblib processes": (
        "[0, 1, 2, 3]",
        """
        from joblib import Parallel, delayed
        Parallel(n_jobs=2)(delayed(abs)(-i) for i in range(4))
        """,
    ),
    "scipy": (
        "1.414214",
        """
        from scipy import optimize
        round(optimize.brentq(lambda x: x * x - 2, 0, 2), 6)
        """,
    ),
    "sqlite": (
        "(4950,)",
        """
        import sqlite3
        db = sqlite3.connect('d.sqlite')
        db.execute('pragma journal_mode=wal')
        db.execute('create table t(a)')
        db.executemany('insert into t values(?)', [(i,) for i in range(100)])
        db.commit()
        db.execute('select sum(a) from t').fetchone()
        """,
    ),
    "asyncio": (
        "b'hi\\n'",
        """
        import asyncio
        async def main():
            process = await asyncio.create_subprocess_exec('echo', 'hi', stdout=asyncio.subprocess.PIPE)
            return (await process.communicate())[0]
        asyncio.run(main())
        """,
    ),
    "top-level await": (
        "'slept'",
        """
        import asyncio
        await asyncio.sleep(0.01, 'slept')
        """,
    ),
    "subprocess": (
        "'42\\n'",
        """
        import subprocess
        subprocess.run('echo $((6*7)) | awk 1', shell=True, capture_output=True, text=True).stdout
        """,
    ),
    "subprocess python": (
        "'3\\n'",
        """
        import subprocess, sys
        code = 'import numpy; print(numpy.arange(3).sum())'
        subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout
        """,
    ),
    "threads": (
        "328350",
        """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(8) as pool:
            total = sum(pool.map(lambda i: i * i, range(100)))
        total
        """,
    ),
    "fork": (
        "[0, 2, 4, 6]",
        """
        import multiprocessing as mp
        def double(x): return 2 * x
        with mp.get_context('fork').Pool(2) as pool:
            doubled = pool.map(double, range(4))
        doubled
        """,
    ),
    "spawn": (
        "[2, 3]",
        """
        import multiprocessing as mp, math
        with mp.get_context('spawn').Pool(2) as pool:
            roots = pool.map(math.isqrt, [4, 9])
        roots
        """,
    ),
    "forkserver": (
        "[4, 5]",
        """
        import multiprocessing as mp, math
        with mp.get_context('forkserver').Pool(2) as pool:
            roots = pool.map(math.isqrt, [16, 25])
        roots
        """,
    ),
    "shared memory": (
        "7",
        """
        from multiprocessing import shared_memory
        m = shared_memory.SharedMemory(create=True, size=64)
        m.buf[0] = 7
        value = m.buf[0]
        m.close(); m.unlink()
        value
        """,
    ),
    "loopback": (
        "b'ok'",
        """
        import socket, threading
        s = socket.create_server(('127.0.0.1', 0))
        threading.Thread(target=lambda: s.accept()[0].sendall(b'ok')).start()
        socket.create_connection(s.getsockname()).recv(2)
        """,
    ),
    "module in the working directory": (
        "42",
        """
        open('mine.py', 'w').write('answer = 42')
        import mine
        mine.answer
        """,
    ),
    "tempfile": (
        "True",
        """
        import tempfile
        with tempfile.NamedTemporaryFile() as f: name = f.name
        name.startswith('/tmp/')
        """,
    ),
    "time zone": (
        "'2:00:00'",
        """
        import zoneinfo, datetime
        str(datetime.datetime(2026, 7, 1, tzinfo=zoneinfo.ZoneInfo('Europe/Berlin')).utcoffset())
        """,
    ),
    "certificates": (
        "'CERT_REQUIRED'",
        """
        import ssl
        ssl.create_default_context().verify_mode.name
        """,
    ),
    "user": (
        "('user', '/home/user', 'sandbox')",
        """
        import getpass, os, pathlib
        (getpass.getuser(), str(pathlib.Path.home()), os.uname().nodename)
        """,
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_works_inside(sandbox: SandboxInstance, name: str) -> None:
    expected, program = CASES[name]
    outcome = await run(sandbox, textwrap.dedent(program), timeout=90)
    assert outcome.raised is None, outcome.raised.traceback if outcome.raised else ""
    assert outcome.end.status == "ok", outcome.end.reason
    assert outcome.result == expected
