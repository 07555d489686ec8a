"""The tool of docs/adding-a-tool.md works as the page says, and passes the tests on the page."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "adding-a-tool.md").read_text(encoding="utf-8")


def test_the_tool_and_its_tests(tmp_path: Path) -> None:
    tool, contract, own_tests = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "dice_tool.py").write_text(tool, encoding="utf-8")
    for name, tests in (("test_contract.py", contract), ("test_dice_tool.py", own_tests)):
        tests = tests.replace("from fumehood.tools.dice_tool import", "from dice_tool import")
        (tmp_path / name).write_text(tests, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\npythonpath = .\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b1\d passed", done.stdout)
    ruff = [sys.executable, "-m", "ruff"]
    name = str(
        ROOT / "src" / "fumehood" / "tools" / "dice_tool.py"
    )  # the rules for the place where it would be
    for command in (
        ["check", "--stdin-filename", name, "-"],
        ["format", "--check", "--stdin-filename", name, "-"],
    ):
        linted = subprocess.run([*ruff, *command], input=tool, capture_output=True, text=True, cwd=ROOT)
        assert linted.returncode == 0, linted.stdout + linted.stderr
