"""Searches for state of one sandbox in the next, through the zygote.

Every sandbox is a copy of the zygote: whatever that was told, or has made for others, could be read by the next one.
"""

import hashlib
from textwrap import dedent

from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.support.sandbox_runs import run, settings

# The program knows only beginnings, so that its own copies of them are not taken for finds.
SEARCH = """
    import hashlib
    found = set()
    memory = open("/proc/self/mem", "rb", 0)
    for line in open("/proc/self/maps").read().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if line.split()[1].startswith("r") and "[v" not in line:
            try: memory.seek(low); piece = memory.read(high - low)
            except OSError: continue
            for number, start, length, digest in {marks}:
                at = piece.find(start)
                while at >= 0:
                    if hashlib.sha256(piece[at:at + length]).hexdigest() == digest:
                        found.add(number)
                    at = piece.find(start, at + 1)
    print(*sorted(found))
"""


async def _found_in(box: SandboxInstance, words: list[bytes]) -> list[int]:
    """Which of these words are somewhere in its interpreter's memory."""
    marks = [
        (number, word[:10], len(word), hashlib.sha256(word).hexdigest()) for number, word in enumerate(words)
    ]
    outcome = await run(box, dedent(SEARCH).replace("{marks}", repr(marks)))
    assert outcome.end.status == "ok", outcome
    return [int(number) for number in outcome.stdout.split()]


async def test_the_heap_holds_nothing_of_a_neighbour() -> None:
    names = [f"to-the-tax-office-{'x' * 16 * number}.secret" for number in range(12)]
    async with Supervisor(settings(preload=())) as shared:
        neighbour = await shared.create()
        for name in names:  # of many lengths: a later message covers an earlier one of its own size
            await neighbour.files.write(name, b"x")
        words = [word.encode() for word in (*names, neighbour.id)]
        assert await _found_in(await shared.create(), words) == []


async def test_no_sandbox_holds_the_keys_of_an_earlier_one() -> None:
    """Random states are renewed in the zygote before each fork: what they were before must not be left there."""
    program = """
        import multiprocessing.process, numpy, random, struct
        print(bytes(multiprocessing.process.current_process().authkey).hex())
        print(struct.pack("=32I", *random.getstate()[1][:32]).hex())
        print(numpy.random.get_state()[1][:32].tobytes().hex())
    """
    async with Supervisor(settings(preload=("numpy",))) as shared:
        boxes = [await shared.create() for _ in range(4)]
        told = [(await run(box, dedent(program))).stdout.split() for box in boxes[:-1]]
        keys = [bytes.fromhex(key) for keys in told for key in keys]
        assert len(set(keys)) == 9
        assert await _found_in(boxes[0], keys[:3]) == [0, 1, 2]
        assert await _found_in(boxes[-1], keys) == []


async def test_the_memory_that_all_share_cannot_be_opened() -> None:
    """It is a file without a name, mapped so that everybody's changes are their own; a descriptor could change it."""
    program = """
        import errno, os
        answers = []
        for line in open("/proc/self/maps"):
            place, _, _, _, _, *name = line.split()
            if name and "memfd:zygote" in name[0]:
                low, _, high = place.partition("-")
                for mode in (os.O_RDONLY, os.O_RDWR):
                    try: answers.append(os.open(f"/proc/self/map_files/{int(low, 16):x}-{int(high, 16):x}", mode))
                    except OSError as error: answers.append(errno.errorcode[error.errno])
        print(*answers)
    """
    async with Supervisor(settings(preload=("numpy",))) as shared:
        answers = (await run(await shared.create(), dedent(program))).stdout.split()
    assert answers
    assert set(answers) <= {"EPERM", "EACCES"}
