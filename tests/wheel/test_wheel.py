"""The built wheel, installed by pip and by uv, for root and for an unprivileged user."""

import json
import re
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import fumehood
from tests.support.package_index import FakePackageIndex
from tests.support.wheels import ROOT, Installation

# What a new Python process, started by the code, finds of the host.
LOOK = """
import importlib.util, json, os, sys
host = ["aiohttp", "cryptography", "fumehood", "h11", "msgspec", "openai", "opentelemetry", "prometheus_client",
        "rich", "starlette", "typer", "uv", "uvicorn", "websockets", "yaml"]
sandbox = ["matplotlib", "numpy", "pandas", "pyarrow", "scipy", "sklearn", "sympy"]
site = next(path for path in sys.path if path.endswith("site-packages"))
print(json.dumps({
    "host": [name for name in host if importlib.util.find_spec(name) is not None],
    "sandbox": [name for name in sandbox if importlib.util.find_spec(name) is not None],
    "site": sorted(os.listdir(site)),
    "mounts": open("/proc/self/mountinfo").read(),
    "listed": {path: sorted(os.listdir(path)) for path in ("/", "/root", "/home", "/opt", "/tmp", "/var", "/usr", site)
               if os.access(path, os.R_OK)},
    "reached": [path for path in PATHS if os.path.lexists(path)],
    "environment": dict(os.environ),
    "processes": [name for name in os.listdir("/proc") if name.isdigit()],
    "uid": os.getuid(),
    "writable": os.access(site, os.W_OK),
}))
"""


def _exec(
    installation: Installation, code: str, *options: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    done = installation.fumehood("exec", *options, "-c", code, **variables)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done


def test_it_is_the_wheel_that_runs(installation: Installation) -> None:
    expected = f"fumehood {fumehood.__version__}\n"
    done = installation.fumehood("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")
    python = str(installation.bin / "python")
    assert installation.run(python, "-m", "fumehood", "--version").stdout == expected
    code = "import fumehood, os, sys; print(fumehood.__file__, os.geteuid(), '%d.%d' % sys.version_info[:2])"
    path, uid, version = installation.run(python, "-c", code).stdout.split()
    assert Path(path).is_relative_to(installation.environment)
    assert (uid == "0") is not installation.kind.ordinary
    assert version == installation.kind.python
    # No copy of the source tree is left where an import could find it.
    assert str(ROOT) not in installation.run(python, "-c", "import sys; print(sys.path)").stdout


def test_code_runs_with_its_packages(installation: Installation) -> None:
    code = "import pandas as pd, sklearn, sys\nprint(pd.Series([1, 2, 3]).sum(), sys.version_info.minor)"
    done = _exec(installation, code)
    assert done.stdout == f"6 {installation.kind.python.partition('.')[2]}\n"


def test_a_package_is_installed_for_one_program(installation: Installation, index: FakePackageIndex) -> None:
    code = "import humanize\nprint(humanize.intcomma(1234567))"
    done = _exec(installation, code, "--with", "humanize", FUMEHOOD_INDEX_URL=index.url)
    assert done.stdout == "1,234,567\n"


def test_code_installs_a_package(installation: Installation, index: FakePackageIndex) -> None:
    code = "!pip install --quiet humanize\nimport humanize\nprint(humanize.intcomma(7654321))"
    done = _exec(installation, code, FUMEHOOD_INDEX_URL=index.url)
    assert done.stdout.splitlines()[-1] == "7,654,321"


def test_a_new_process_sees_nothing_of_the_host(installation: Installation) -> None:
    (site,) = installation.environment.glob("lib/python3*/site-packages")
    paths = [
        str(path)
        for path in (site, installation.home, installation.base.resolve(), ROOT, Path("/root/.pyenv"))
    ]
    look = f"PATHS = {paths!r}\n{LOOK}"
    code = (
        f"import subprocess, sys\nprint(subprocess.check_output([sys.executable, '-c', {look!r}], text=True))"
    )
    seen: dict[str, Any] = json.loads(_exec(installation, code).stdout)
    assert seen["host"] == []
    assert seen["sandbox"] == ["matplotlib", "numpy", "pandas", "pyarrow", "scipy", "sklearn", "sympy"]
    assert not {"fumehood", "uvicorn", "cryptography", "msgspec"} & set(seen["site"])
    assert seen["reached"] == []
    visible = json.dumps([seen["mounts"], seen["listed"]])
    for path in (*paths, installation.kind.installer + "-" + installation.kind.python, "fumehood-wheel-"):
        assert path not in visible
    assert "canary-4711" not in json.dumps(seen)
    assert not [name for name in seen["environment"] if name.startswith(("FUMEHOOD", "XDG", "SECRET"))]
    assert len(seen["processes"]) < 10
    assert seen["uid"] == 1000
    assert seen["writable"] is False


def test_doctor_finds_nothing_missing(installation: Installation, index: FakePackageIndex) -> None:
    done = installation.fumehood("doctor", "--json", FUMEHOOD_INDEX_URL=index.url)
    report = json.loads(done.stdout)
    missing = [finding for finding in report["findings"] if finding["state"] == "missing"]
    assert (done.returncode, missing) == (0, []), report


def test_the_data_is_in_the_directory_of_its_user(installation: Installation) -> None:
    directory = installation.home / ".local" / "share" / "fumehood"
    assert installation.fumehood("keys", "list", "--json", "--data", "elsewhere").returncode == 0
    assert not (installation.home / "elsewhere").exists()
    assert installation.fumehood("config", "check").returncode == 0
    shown = installation.fumehood("config", "check", "--show").stdout
    assert f"url: sqlite:///{directory}/fumehood.db\n" in shown
    created = installation.fumehood("keys", "create", "--data", "keys")
    assert created.stdout.startswith("fh-")
    assert (installation.home / "keys" / "fumehood.db").exists()
    assert not (installation.home / "fumehood.db").exists()


def test_the_gateway_serves_a_code_interpreter(installation: Installation) -> None:
    command = installation.command(
        str(installation.bin / "fumehood"),
        *("serve", "--port", "0"),
    )
    server = subprocess.Popen(
        command, cwd=installation.home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        address = _address(server)
        answer = _ask(address)
        call = next(item for item in answer["output"] if item["type"] == "code_interpreter_call")
        assert call["outputs"] == [{"type": "logs", "logs": "1.4142135623730951\n"}], call
        assert answer["status"] == "completed"
        again = _ask(address, "print(root * 2)", previous_response_id=answer["id"])
        call = next(item for item in again["output"] if item["type"] == "code_interpreter_call")
        assert call["outputs"] == [{"type": "logs", "logs": "2.8284271247461903\n"}], call
    finally:
        _stop(server)


def _address(server: "subprocess.Popen[str]") -> str:
    assert server.stdout is not None
    lines: list[str] = []
    for line in server.stdout:
        lines.append(line)
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return found.group()
    raise AssertionError("".join(lines))


def _ask(
    address: str, code: str = "import numpy as np\nroot = float(np.sqrt(2))\nprint(root)", **more: str
) -> Any:
    body = {
        "model": "direct",
        "input": f"```python\n{code}\n```",
        "tools": [{"type": "code_interpreter", "container": {"type": "auto"}}],
        "include": ["code_interpreter_call.outputs"],
        **more,
    }
    request = urllib.request.Request(
        f"{address}/v1/responses", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=100) as response:
        return json.load(response)


def _stop(server: "subprocess.Popen[str]") -> None:
    """By its own process: the command may be run by another one, which ends with it."""
    server.terminate()
    try:
        server.communicate(timeout=60)
    finally:
        if server.poll() is None:
            server.kill()
            server.communicate()
