"""Runs the command line, and writes which of Fumehood's functions called which.

Every line has a caller and a callee, with a tab between:

    python call_recorder.py FILE serve --port 0

Calls through other packages count as calls of ours: a caller is the nearest function of Fumehood on the stack.
"""

import atexit
import inspect
import os
import sys
from pathlib import Path
from types import CodeType, FrameType

import fumehood
from fumehood.__main__ import main

_ROOT = str(Path(fumehood.__file__).parent) + "/"
_TOOL = sys.monitoring.PROFILER_ID
_calls: set[tuple[CodeType | None, CodeType]] = set()


def _record(code: CodeType, _offset: int) -> object:
    if not code.co_filename.startswith(_ROOT):
        return sys.monitoring.DISABLE
    frame = inspect.currentframe()
    caller: FrameType | None = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
    while caller is not None and not caller.f_code.co_filename.startswith(_ROOT):
        caller = caller.f_back
    _calls.add((None if caller is None else caller.f_code, code))
    return None


def _name(code: CodeType | None) -> str:
    if code is None:
        return "-"
    module = code.co_filename.removeprefix(_ROOT).removesuffix(".py").replace("/", ".")
    return f"{module}.{code.co_qualname.replace('<locals>.', '')}"


def _write(target: Path, process: int) -> None:
    if os.getpid() == process:
        target.write_text("\n".join(sorted(f"{_name(caller)}\t{_name(callee)}" for caller, callee in _calls)))


if __name__ == "__main__":
    atexit.register(_write, Path(sys.argv.pop(1)), os.getpid())
    sys.monitoring.use_tool_id(_TOOL, "call recorder")
    sys.monitoring.register_callback(_TOOL, sys.monitoring.events.PY_START, _record)
    sys.monitoring.set_events(_TOOL, sys.monitoring.events.PY_START)
    main()
