"""What the two tokens of a sandbox server open; imports `fumehood.sandboxd`."""

from fumehood.sandboxd.operations import OPERATIONS
from tests.support.sandboxes import settings
from tests.support.server import Client, serving

TOKEN = "a-token-of-some-length"
METRICS_TOKEN = "a-token-for-metrics-only"


async def test_the_token_for_metrics_opens_no_other_operation() -> None:
    async with serving(settings(preload=(), pool=0), token=TOKEN, metrics_token=METRICS_TOKEN) as server:
        scraper = Client(server.where, METRICS_TOKEN)
        try:
            for operation in OPERATIONS:
                path = operation.path.format(id="box", path="x", execution_id="e")
                answer = await scraper.ask(operation.method, path, {"code": "1"})
                if operation.path == "/metrics":
                    assert answer.status == 200
                elif operation.path == "/health":
                    assert answer.json == {"status": "ok"}
                else:
                    assert answer.error == (401, "not_allowed", None), path
            assert (await scraper.ask("GET", "/nothing")).status == 401
        finally:
            await scraper.session.close()
        assert (await server.client.ask("GET", "/metrics")).status == 200
        assert (await server.client.ask("GET", "/sandboxes")).json == {"sandboxes": []}


async def test_without_a_second_token_metrics_want_the_first() -> None:
    async with serving(settings(preload=(), pool=0), token=TOKEN) as server:
        stranger = Client(server.where, METRICS_TOKEN)
        try:
            assert (await stranger.ask("GET", "/metrics")).status == 401
        finally:
            await stranger.session.close()
