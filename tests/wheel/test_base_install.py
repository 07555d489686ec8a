"""The wheel without extras, installed by pip and by uv."""

import fumehood
from tests.support.wheels import Installation


def test_the_base_install_answers(base_installation: Installation) -> None:
    installed = [
        path.name for path in base_installation.environment.glob("lib/python3*/site-packages/*.dist-info")
    ]
    names = {name.partition("-")[0] for name in installed} - {"pip"}
    assert names == {"fumehood", "msgspec"}
    done = base_installation.fumehood("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"fumehood {fumehood.__version__}\n", "")
    python = str(base_installation.bin / "python")
    for command in ((str(base_installation.bin / "fumehood"),), (python, "-m", "fumehood")):
        done = base_installation.run(*command, "--help")
        assert (done.returncode, done.stderr) == (0, "")
        assert "Installed: the client library (`import fumehood.client`).\n" in done.stdout
        assert "pip install 'fumehood[all]'" in done.stdout
        done = base_installation.run(*command, "exec", "-c", "1")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (125, "", 1)
        assert "pip install 'fumehood[all]'" in done.stderr
    done = base_installation.run(python, "-c", "import fumehood.client")
    assert (done.returncode, done.stderr) == (0, "")
