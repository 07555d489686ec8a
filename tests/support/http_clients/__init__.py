"""HTTP clients that are not Python's, each run as a process."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent
_SECONDS = 180

needs_java = pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK")
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")


async def run(*command: str | Path) -> str:
    """What it prints; a program that fails is a failure."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_SECONDS):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode == 0, err.decode() + out.decode()
    return out.decode()


async def post_from_java(url: str, body: dict[str, Any], folder: Path) -> dict[str, tuple[int, str]]:
    """Post it in all ways that Post.java knows: the status and the body of each answer, newlines being `|`."""
    path = folder / "body.json"
    path.write_text(json.dumps(body))
    printed = await run("java", "-Xshare:auto", _HERE / "Post.java", url, path)
    lines = [line.split(" ", 2) for line in printed.splitlines()]
    return {way: (int(status), answer) for way, status, answer in lines}


async def post_from_curl(url: str, body: dict[str, Any], *options: str) -> tuple[int, str]:
    """Post it with `curl --http2`, which asks for the upgrade and is content without."""
    printed = await run(
        *("curl", "--silent", "--show-error", "--http2", "--max-time", str(_SECONDS)),
        *("--header", "content-type: application/json", "--data-binary", json.dumps(body)),
        *("--write-out", "\n%{http_code}"),
        *(*options, url),
    )
    answer, _, status = printed.rpartition("\n")
    return int(status), answer
