"""A process that writes to a store and prints what was acknowledged, until it is killed.

It prints a line after the store has returned: `stored ID PREVIOUS` or `deleted ID`. The metadata of a response has the
digest of its entries, so that the test can check them.
"""

import asyncio
import hashlib
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from fumehood.protocol.conversation import ConversationEntry
from fumehood.protocol.openai.responses import Response
from fumehood.store.sqlite_store import SqliteStore
from fumehood.testing.conformance_kits.store_fixtures import make_response, make_user_item

WRITERS = 8


def digest_items(entries: Sequence[ConversationEntry]) -> str:
    return hashlib.sha256(b"\n".join(entry.raw for entry in entries)).hexdigest()


def _print_line(line: str) -> None:
    os.write(1, f"{line}\n".encode())


async def _write_conversations(store: SqliteStore, chance: random.Random) -> None:
    tips: list[Response] = []
    while True:
        pending = make_response(
            store, "x" * chance.choice((10, 1000, 20_000)), after=chance.choice([None, *tips[-3:]])
        )
        pending.entries[1:1] = [make_user_item(str(number)) for number in range(chance.randrange(4))]
        pending.response.metadata = {
            "digest": digest_items(pending.entries),
            "entries": str(len(pending.entries)),
        }
        lease = await pending.begin()
        if chance.random() < 0.3:
            await store.renew_leases([lease])
        _print_line(f"started {pending.response.id}")
        response = await pending.complete(lease)
        _print_line(f"stored {response.id} {response.previous_response_id or '-'}")
        tips.append(response)
        if chance.random() < 0.2:
            gone = tips.pop(chance.randrange(len(tips)))
            _print_line(f"deleting {gone.id}")
            await store.delete_response("tenant", gone.id)
            _print_line(f"deleted {gone.id}")


async def _main(path: Path, seed: int) -> None:
    store = await SqliteStore.open(path)
    await make_response(store, "never ends").begin()
    await store.fail_orphaned_responses()  # also writes the pending beginning
    await asyncio.gather(
        *(_write_conversations(store, random.Random(seed + number)) for number in range(WRITERS))
    )


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2])))
