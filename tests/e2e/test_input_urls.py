"""Files by their addresses, through a gateway that may fetch them and one that may not."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.conftest import RunningGateway, make_client, make_settings_without_code
from tests.support import gateway_process
from tests.support.gateway_process import ScriptedModelServer, text_answer
from tests.support.websites import Website


@pytest.fixture
def website() -> Iterator[Website]:
    """In a thread of its own, since the clients here wait."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    site = Website(reply=lambda _: (200, [("Content-Type", "text/csv")], b"a,b\n"))
    asyncio.run_coroutine_threadsafe(site.__aenter__(), loop).result(30)
    yield site
    asyncio.run_coroutine_threadsafe(site.__aexit__(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def make_file_input(address: str) -> Any:
    return [{"role": "user", "content": [{"type": "input_file", "file_url": address}]}]


def make_image_input(address: str) -> Any:
    return [{"role": "user", "content": [{"type": "input_image", "image_url": address}]}]


def test_addresses_are_fetched_only_where_the_operator_says_so(
    gateway: RunningGateway, tmp_path: Path, website: Website
) -> None:
    address = f"http://127.0.0.1:{website.port}/t.csv"
    gateway.model.script()
    with pytest.raises(openai.BadRequestError, match=r"inputs\.fetch_urls or inputs\.pass_urls") as refused:
        gateway.strict.responses.create(model="scripted", input=make_file_input(address))
    assert refused.value.param == "input[0].content[0].file_url"
    assert gateway.model.requests == []
    with ScriptedModelServer() as model:
        settings = make_settings_without_code(model)
        passing = {**settings, "inputs": {"pass_urls": True}}
        with (
            gateway_process.run_gateway(tmp_path, passing) as running,
            make_client(running, strict=True) as client,
        ):
            model.script(text_answer("Seen."))
            for private in (address, "http://localhost/p.png", "http://169.254.169.254/latest/meta-data/"):
                with pytest.raises(openai.BadRequestError, match="not public") as refused:
                    client.responses.create(model="scripted", input=make_image_input(private))
                assert refused.value.param == "input[0].content[0].image_url"
            client.responses.create(
                model="scripted", input=make_image_input("https://pictures.example.com/p.png")
            )
        (sent,) = model.requests
        assert (
            sent.json["messages"][0]["content"][0]["image_url"]["url"] == "https://pictures.example.com/p.png"
        )
        assert website.seen == []

        fetching = {**settings, "inputs": {"fetch_urls": True, "fetch_private_networks": ["127.0.0.0/8"]}}
        with (
            gateway_process.run_gateway(tmp_path, fetching) as running,
            make_client(running, strict=True) as client,
        ):
            model.script(text_answer("Seen."), text_answer("Still."))
            with pytest.raises(openai.BadRequestError, match="not public") as refused:
                client.responses.create(model="scripted", input=make_file_input("http://10.0.0.1/t.csv"))
            assert refused.value.param == "input[0].content[0].file_url"
            first = client.responses.create(model="scripted", input=make_file_input(address))
            client.responses.create(model="scripted", input="Sure?", previous_response_id=first.id)
        assert [one.json["messages"][0]["content"] for one in model.requests] == [
            "The file t.csv:\na,b\n"
        ] * 2
        assert len(website.seen) == 1
