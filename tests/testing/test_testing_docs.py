"""The examples in docs/testing.md pass."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# In place of the reader's own provider.
_MY_PROVIDER = "from tests.support.scripted_sandbox_programs import make_scripted_sandboxes as MySandboxes\n"


def test_examples(tmp_path: Path) -> None:
    text = (ROOT / "docs/testing.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(examples) == 5
    for number, example in enumerate(examples):
        (tmp_path / f"test_example_{number}.py").write_text(example)
    (tmp_path / "my_provider.py").write_text(_MY_PROVIDER)
    (tmp_path / "my_model.py").write_text(
        "from fumehood.models.direct_execution import DirectExecutionBackend as MyModel\n"
    )
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\npythonpath = .\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", tmp_path],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d{2,} passed", done.stdout, re.MULTILINE)
