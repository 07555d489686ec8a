"""Which operations each of the two bearer tokens allows."""

from fumehood.sandbox_server.api.http_operations import OPERATIONS
from tests.support.sandbox_runs import settings
from tests.support.sandbox_server import SandboxApiClient, run_server

TOKEN = "a-token-of-some-length"
METRICS_TOKEN = "a-token-for-metrics-only"


async def test_the_token_for_metrics_opens_no_other_operation() -> None:
    async with run_server(settings(preload=(), pool=0), token=TOKEN, metrics_token=METRICS_TOKEN) as server:
        scraper = SandboxApiClient(server.where, METRICS_TOKEN)
        try:
            for operation in OPERATIONS:
                path = operation.path.format(id="box", path="x", execution_id="e")
                answer = await scraper.request(operation.method, path, {"code": "1"})
                if operation.path == "/metrics":
                    assert answer.status == 200
                elif operation.path == "/health":
                    assert answer.json == {"status": "ok"}
                else:
                    assert answer.error == (401, "not_allowed", None), path
            assert (await scraper.request("GET", "/nothing")).status == 401
        finally:
            await scraper.session.close()
        assert (await server.client.request("GET", "/metrics")).status == 200
        assert (await server.client.request("GET", "/sandboxes")).json == {"sandboxes": []}
