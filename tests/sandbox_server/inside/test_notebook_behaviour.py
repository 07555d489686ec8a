"""Notebook behaviour: interrupts, `await`, magics, rich objects and figures."""

import base64
import importlib.util
import struct
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from fumehood.sandbox_server.inside.framing import MessageKind
from tests.sandbox_server.inside.test_code_runner import PRELOADED, SMALL_DISPLAYS, Kernel, kernel

__all__ = ["kernel"]  # the fixture

# --- interrupts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "busy",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import os; os.system('sleep 1000'); os.system('sleep 1000'); time.sleep(1000)",
        "import subprocess; subprocess.run(['sleep', '1000'])",
        "while True: print('x')",
        "while True: print('x' * 100_000)",
        "import threading; threading.Event().wait()",
        "import asyncio; await asyncio.sleep(1000)",
        "import asyncio; asyncio.run(asyncio.sleep(1000))",
        "x = [0] * 10_000_000\nwhile True: sorted(x)",
        "type('A', (), {'__repr__': lambda s: time.sleep(1000)})()",
    ],
)
def test_an_interrupt_ends_a_call(kernel: Kernel, busy: str) -> None:
    kernel.run("import time; keep = 5")
    call = kernel.start(f"print('started', flush=True)\n{busy}")
    reply = kernel.interrupt(call, kernel.wait_for_text(call, "started"))
    assert (reply.error["name"], reply.exit_code, reply.interrupted) == ("KeyboardInterrupt", 1, True)
    assert "fumehood" not in reply.traceback
    assert kernel.run("keep").result == "5"


def test_code_that_swallows_interrupts_gets_the_next_one(kernel: Kernel) -> None:
    call = kernel.start("""
        import time
        count = 0
        while count < 5:
            try:
                print("started")
                while count < 5:
                    try: time.sleep(1000)
                    except: count += 1
            except: count += 1
    """)
    reply = kernel.interrupt(call, kernel.wait_for_text(call, "started"))
    assert kernel.run("count").result == "5"
    assert (reply.exit_code, reply.interrupted, reply.all(MessageKind.ERROR)) == (0, False, [])


def test_an_interrupt_that_becomes_another_error_is_that_error(kernel: Kernel) -> None:
    call = kernel.start("""
        import time
        try: print("started"); time.sleep(1000)
        except KeyboardInterrupt: raise ValueError("turned") from None
    """)
    reply = kernel.interrupt(call, kernel.wait_for_text(call, "started"))
    assert (reply.error["name"], reply.interrupted) == ("ValueError", False)


def test_a_program_that_raises_keyboard_interrupt_was_not_interrupted(kernel: Kernel) -> None:
    reply = kernel.run("raise KeyboardInterrupt")
    assert (reply.error["name"], reply.exit_code, reply.interrupted) == ("KeyboardInterrupt", 1, False)


def test_interrupts_between_calls_are_ignored_and_the_handler_comes_back(kernel: Kernel) -> None:
    kernel.run("import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); signal.default_int_handler;")
    assert kernel.run("signal.signal(signal.SIGINT, lambda *a: None);").exit_code == 0
    kernel.process.send_signal(2)
    assert kernel.run("1").result in {"1", None}  # it may just have hit this call
    call = kernel.start("import time\nprint('started')\ntime.sleep(1000)")
    assert kernel.interrupt(call, kernel.wait_for_text(call, "started")).interrupted


def test_storms_of_interrupts_break_no_message(kernel: Kernel) -> None:
    """The framing is checked by the assembler on this side, the call ids by `finish`."""
    for _ in range(5):
        call = kernel.start("""
            import os, signal, time
            if (child := os.fork()) == 0:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                parent = os.getppid()
                for _ in range(300): os.kill(parent, signal.SIGINT); time.sleep(0.0005)
                os._exit(0)
            n = 0
            while True:
                try:
                    while True: print("x" * 1000); display({"n": n})
                except KeyboardInterrupt:
                    n += 1
                    if n >= 20: break
        """)
        reply = kernel.finish(call)
        assert reply.exit_code in {0, 1}
        assert set(reply.out) <= {"x", "\n"} or "truncated" in reply.out
        # What is left of the storm may hit the next calls, but only their own code.
        # (The first interrupt may come before the child's number is stored.)
        reply = kernel.run("import os\nos.waitpid(-1, 0)")
        while reply.exit_code:
            reply = kernel.run("import os\ntry: os.waitpid(-1, 0)\nexcept ChildProcessError: pass")


def test_an_interrupt_in_a_drawing_leaves_matplotlib_usable(tmp_path: Path) -> None:
    with Kernel(tmp_path, start=PRELOADED) as kernel:
        call = kernel.start("""
            import matplotlib.pyplot as plt, numpy as np
            print("started")
            while True:
                plt.imshow(np.random.rand(500, 500)); plt.show()
        """)
        reply = kernel.interrupt(call, kernel.wait_for_text(call, "started"))
        assert reply.interrupted
        assert reply.all(MessageKind.ERROR)[0]["name"] == "KeyboardInterrupt"
        assert len(kernel.run("plt.plot([1, 2]);").all(MessageKind.DISPLAY)) == 1


def test_interrupts_do_not_reach_the_hooks_of_a_fork_but_what_comes_after(kernel: Kernel) -> None:
    """What is raised in a hook is lost, and printed as ignored."""
    kernel.run("""
        import os, signal, sys, threading
        asked = None
        def strike(where):
            if where == asked: signal.raise_signal(signal.SIGINT)
        for where in ("before", "after_in_parent", "after_in_child"):
            os.register_at_fork(**{where: lambda where=where: strike(where)})
        def fork():
            parent = os.getpid()
            try:
                child, how = os.fork(), "spared"
            except KeyboardInterrupt:
                child, how = os.getpid() == parent, "interrupted"
            if not child:
                print("child", how, flush=True)
                os._exit(0)
            os.wait()
            print("parent", how)
    """)
    struck = {
        where: kernel.run(f"asked = {where!r}\nfork()")
        for where in ("before", "after_in_parent", "after_in_child")
    }
    assert {where: (reply.out, reply.err) for where, reply in struck.items()} == {
        "before": ("child spared\nparent interrupted\n", ""),
        "after_in_parent": ("child spared\nparent interrupted\n", ""),
        "after_in_child": ("child interrupted\nparent spared\n", ""),
    }
    # In the child of a thread that thread is the main one.
    reply = kernel.run("thread = threading.Thread(target=fork); thread.start(); thread.join()")
    assert (reply.out, reply.err) == ("child interrupted\nparent spared\n", "")


def test_a_forked_child_can_be_interrupted(kernel: Kernel) -> None:
    call = kernel.start("""
        import os, time
        if os.fork() == 0:
            try:
                print("started", flush=True)
                time.sleep(1000)
            except KeyboardInterrupt:
                print("child interrupted", flush=True)
                os._exit(0)
        while True:
            try: os.wait(); break
            except KeyboardInterrupt: pass
    """)
    reply = kernel.interrupt(call, kernel.wait_for_text(call, "started"))
    assert (reply.out, reply.err) == ("started\nchild interrupted\n", "")


# --- await --------------------------------------------------------------------------------------------


def test_an_interrupted_await_does_not_go_on_later(kernel: Kernel) -> None:
    call = kernel.start("""
        import asyncio
        try:
            print("started")
            await asyncio.sleep(1000)
        finally: print("cleaned up")
        print("never")
    """)
    reply = kernel.interrupt(call, kernel.wait_for_text(call, "started"))
    assert reply.out == "started\ncleaned up\n"
    assert "<module>" in reply.traceback
    assert kernel.run("await asyncio.sleep(0.01)").out == ""


def test_an_exit_in_another_task_ends_the_cell_for_good(kernel: Kernel) -> None:
    reply = kernel.run("""
        import asyncio, sys
        async def leave(): sys.exit(9)
        task = asyncio.ensure_future(leave())
        await asyncio.sleep(0.01)
        print("never")
    """)
    assert reply.exit_code == 9
    assert kernel.run("await asyncio.sleep(0.05)").out == ""


# --- magics -------------------------------------------------------------------------------------------


def test_shell_lines(kernel: Kernel) -> None:
    reply = kernel.run("""
        !echo "it's" one
        if True:
            !echo two \\
               three
        text = '''
        !echo four
        %nothing'''
        number = (7
            % 4)
        %matplotlib inline
        print(text, number)
    """)
    assert reply.out == "it's one\ntwo three\n\n!echo four\n%nothing 3\n"
    assert kernel.run("!exit 3").exit_code == 0
    assert kernel.run("!python -c 'import sys; print(sys.version_info[:2] >= (3, 12))'").out == "True\n"


def test_pip_is_the_interpreters_own(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "pip.py").write_text("import sys; print('pip', *sys.argv[1:])")
    assert kernel.run("%pip install -q 'x>1'").out == "pip install -q x>1\n"
    assert kernel.run("!pip install y").out == "pip install y\n"


@pytest.mark.parametrize("magic", ["%timeit", "%%time", "%cd"])
def test_other_magics_are_named(kernel: Kernel, magic: str) -> None:
    reply = kernel.run(f"print('not run')\n{magic} 1")
    assert reply.out == ""
    assert reply.error["value"] == (
        f"the IPython magic {magic} is not available here; write it in plain Python (<cell 1>, line 2)"
    )


def test_errors_below_a_magic_keep_their_line(kernel: Kernel) -> None:
    assert 'File "<cell 1>", line 2, in <module>\n    1/0' in kernel.run("!true\n1/0").traceback
    assert 'File "<cell 2>", line 2\n    if x\n' in kernel.run("!true\nif x").traceback


# --- rich objects -------------------------------------------------------------------------------------


def test_display_and_rich_objects(kernel: Kernel) -> None:
    reply = kernel.run("""
        class Rich:
            def __repr__(self): return "rich"
            def _repr_html_(self): return "<b>rich</b>"
            def _repr_png_(self): return b"png", {"width": 1}
            def _repr_markdown_(self): return None
            def _repr_latex_(self): raise NotImplementedError
            def _repr_json_(self): return {"a": [1]}
            def _repr_svg_(self): raise ValueError("broken")
        class Bundle:
            def __repr__(self): return "bundle"
            def _repr_mimebundle_(self, include, exclude): return {"text/markdown": "*b*", "text/html": None}
        print("first")
        display(Rich(), Bundle(), Rich)
        display({"text/plain": "raw", "image/png": b"x"}, raw=True)
        Rich()
    """)
    rich = {
        "text/plain": "rich",
        "text/html": "<b>rich</b>",
        "image/png": "cG5n",
        "application/json": '{"a": [1]}',
    }
    broken = "[Rich._repr_svg_ failed: ValueError: broken]\n"
    assert reply.sequence == [
        ("STDOUT", "first\n"),
        ("STDERR", broken),
        ("DISPLAY", rich),
        ("DISPLAY", {"text/plain": "bundle", "text/markdown": "*b*"}),
        ("DISPLAY", {"text/plain": "<class '__main__.Rich'>"}),
        ("DISPLAY", {"text/plain": "raw", "image/png": "eA=="}),
        ("STDERR", broken),
        ("RESULT", rich),
        ("END", {"exit_code": 0, "interrupted": False}),
    ]


def test_proxies_and_mocks_are_plain_text(kernel: Kernel) -> None:
    reply = kernel.run("from unittest.mock import Mock\nMock(name='m')")
    assert [*reply.all(MessageKind.RESULT)[0]] == ["text/plain"]


def test_displays_are_bounded(tmp_path: Path) -> None:
    with Kernel(tmp_path, start=SMALL_DISPLAYS) as kernel:
        reply = kernel.run("""
            class Wide:
                def __repr__(self): return "wide"
                def _repr_html_(self): return "<p>" * 1000
            display(Wide(), "é" * 3000)
            for n in range(10): display(n)
        """)
        first, second, third = reply.all(MessageKind.DISPLAY)
        assert first == {"text/plain": "wide\n[text/html dropped: 3000 bytes, more than 2000]"}
        assert second["text/plain"].startswith("'ééé")
        assert second["text/plain"].endswith("[truncated]")
        assert third == {"text/plain": "0"}
        assert reply.err == "[displays dropped: more than 3 in one call]\n"
        assert len(kernel.run("display(1)").all(MessageKind.DISPLAY)) == 1


def test_displays_of_one_call_are_bounded_together(tmp_path: Path) -> None:
    with Kernel(tmp_path, display_bytes=1000) as kernel:
        for _ in range(2):
            reply = kernel.run("for n in (400, 400, 400, 10, 400): display('x' * n)\n'y' * 400")
            assert [len(bundle["text/plain"]) for bundle in reply.all(MessageKind.DISPLAY)] == [402, 402, 12]
            assert reply.result is None
            assert reply.err == "[display left out: more than 1000 bytes shown in this call]\n"
        assert kernel.run("display('\\0' * 100, 'é' * 150)").err != ""  # escapes count


def test_forms_of_a_display_are_bounded(kernel: Kernel) -> None:
    reply = kernel.run("display({f'x/{n}': 'x' for n in range(40)} | {'text/plain': 'p'}, raw=True)")
    (bundle,) = reply.all(MessageKind.DISPLAY)
    assert [*bundle] == ["text/plain", *(f"x/{n}" for n in range(31))]
    assert reply.err == "[9 of 41 forms of a display left out]\n"


def test_a_real_ipython_shows_things_as_well(kernel: Kernel, tmp_path: Path) -> None:
    package = tmp_path / "elsewhere" / "IPython"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("real = True\n")
    (package / "display.py").write_text(
        "def display(*_): print('no shell')\nclass HTML(str): _repr_html_ = str.__str__\n"
    )
    reply = kernel.run(f"""
        import sys
        sys.path.insert(0, {str(package.parent)!r})
        from IPython.display import display, HTML
        display(HTML("<b>x</b>"))
        sys.modules["IPython"].real
    """)
    assert reply.all(MessageKind.DISPLAY)[0]["text/html"] == "<b>x</b>"
    assert reply.result == "True"


@pytest.mark.skipif(importlib.util.find_spec("IPython") is not None, reason="the real one is installed")
def test_the_ipython_stand_in(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(b"\x89PNG")
    assert kernel.run("import sys; 'IPython' in sys.modules").result == "False"
    reply = kernel.run("""
        from IPython.display import display, Image, HTML, Markdown, SVG, JSON, clear_output
        clear_output(wait=True)
        display(HTML("<i>h</i>"), Markdown("**m**"), SVG("<svg/>"), JSON({"a": 1}))
        Image("p.png")
    """)
    rich = [[*bundle.items()][1] for bundle in reply.all(MessageKind.DISPLAY)]
    assert rich == [
        ("text/html", "<i>h</i>"),
        ("text/markdown", "**m**"),
        ("image/svg+xml", "<svg/>"),
        ("application/json", '{"a": 1}'),
    ]
    assert reply.all(MessageKind.RESULT)[0]["image/png"] == base64.b64encode(b"\x89PNG").decode()
    assert kernel.run("import IPython.core").error["name"] == "ModuleNotFoundError"


def test_data_frames_and_pictures(tmp_path: Path) -> None:
    with Kernel(tmp_path, start=PRELOADED) as kernel:
        frame = kernel.run("import pandas as pd\npd.DataFrame({'a': [1, 2]})").all(MessageKind.RESULT)[0]
        assert frame["text/plain"] == "   a\n0  1\n1  2"
        assert "<table" in frame["text/html"]
        reply = kernel.run("from PIL import Image\nimage = Image.new('RGB', (30, 20))\nimage.show()\nimage")
        assert _size(reply.all(MessageKind.DISPLAY)[0]) == (30, 20)
        assert _size(reply.all(MessageKind.RESULT)[0]) == (30, 20)
        assert "image/jpeg" not in reply.all(MessageKind.RESULT)[0]


# --- figures ------------------------------------------------------------------------------------------


def _size(bundle: dict[str, str]) -> tuple[int, int]:
    data = base64.b64decode(bundle["image/png"])
    assert data.startswith(b"\x89PNG\r\n")
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize("preloaded", [True, False])
def test_figures_appear_where_they_are_shown(tmp_path: Path, preloaded: bool) -> None:
    with Kernel(
        tmp_path, **({"start": PRELOADED} if preloaded else {}), environment={"DISPLAY": ":9"}
    ) as kernel:
        reply = kernel.run("""
            print("before")
            import matplotlib.pyplot as plt
            plt.plot([1, 2]); plt.show(); print("between"); fig, ax = plt.subplots(); fig.show(); print("after")
            plt.figure(5, figsize=(3, 3)).text(0.5, 0.5, "kept open")
            plt.figure(2, figsize=(2, 2)); plt.bar([1], [2]); plt.figure(7); plt.figure(5);
        """)
        shown = [(kind, body if kind != "DISPLAY" else body["text/plain"]) for kind, body in reply.sequence]
        assert shown == snapshot(
            [
                ("STDOUT", "before\n"),
                ("DISPLAY", "<Figure size 640x480 with 1 Axes>"),
                ("STDOUT", "between\n"),
                ("DISPLAY", "<Figure size 640x480 with 1 Axes>"),
                ("STDOUT", "after\n"),
                ("DISPLAY", "<Figure size 300x300 with 0 Axes>"),
                ("DISPLAY", "<Figure size 200x200 with 1 Axes>"),
                ("END", {"exit_code": 0, "interrupted": False}),
            ]
        )
        assert all(min(_size(bundle)) > 10 for bundle in reply.all(MessageKind.DISPLAY))
        assert kernel.run("plt.get_fignums()").result == "[]"


def test_figures_that_are_values_are_shown_once(tmp_path: Path) -> None:
    with Kernel(tmp_path, start=PRELOADED) as kernel:
        reply = kernel.run("import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nax.plot([1, 2])\nfig")
        assert _size(reply.all(MessageKind.RESULT)[0]) > (300, 300)
        assert reply.all(MessageKind.DISPLAY) == []
        assert kernel.run("plt.figure()").sequence[:-1] == [
            ("RESULT", {"text/plain": "<Figure size 640x480 with 0 Axes>"})
        ]
        assert (
            len(kernel.run("fig, ax = plt.subplots(); display(fig); display(fig)").all(MessageKind.DISPLAY))
            == 2
        )


def test_figures_and_errors(tmp_path: Path) -> None:
    with Kernel(tmp_path, start=PRELOADED) as kernel:
        reply = kernel.run("import matplotlib.pyplot as plt\nplt.plot([1, 2])\n1/0")
        assert [kind for kind, _ in reply.sequence] == ["DISPLAY", "ERROR", "END"]
        reply = kernel.run("plt.title('$\\\\frac{$');")
        assert reply.error["name"] == "ValueError"
        assert kernel.run("plt.plot([1]); plt.close('all')").all(MessageKind.DISPLAY) == []
