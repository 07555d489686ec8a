"""The SDK's clients of an adapter: given ones, or ones that are created on first use."""

import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fumehood.client.adapters.openai.config import OpenAIClientConfig, check_client
from fumehood.client.dbc import require

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


class SdkClients:
    """A blocking client, and an asynchronous one for each event loop, since connections belong to a loop.

    Given clients are used as they are, and never closed here.
    """

    def __init__(
        self,
        config: OpenAIClientConfig | None,
        client: "OpenAI | None",
        async_client: "AsyncOpenAI | None",
    ) -> None:
        require(
            config is None or (client is None and async_client is None),
            "client and client_config exclude each other; give one.",
        )
        if client is not None:
            check_client(client)
        require(
            async_client is None or _is_async_client(async_client),
            "async_client is a blocking one; pass an AsyncOpenAI(…), or pass it as client=.",
        )
        self._config = config or OpenAIClientConfig()
        self._given_client = client
        self._given_async_client = async_client
        self._client: OpenAI | None = None
        self._async_clients: dict[Any, AsyncOpenAI] = {}
        self._lock = threading.Lock()

    def get_client(self) -> "OpenAI":
        if self._given_client is not None:
            return self._given_client
        require(
            self._given_async_client is None,
            "The adapter has an asynchronous client only, and evaluate, stream and container workspaces need a "
            "blocking one: pass client=OpenAI(…), too.",
        )
        with self._lock:
            if self._client is None:
                self._client = self._config.create_client()
            return self._client

    def get_async_client(self) -> "AsyncOpenAI":
        """Return the client for the running event loop."""
        if self._given_async_client is not None:
            return self._given_async_client
        require(
            self._given_client is None,
            "The adapter has a blocking client only, and aevaluate and astream need an asynchronous one: pass "
            "async_client=AsyncOpenAI(…), too.",
        )
        import asyncio

        loop = asyncio.get_running_loop()
        with self._lock:
            self._drop_closed_loops()
            if loop not in self._async_clients:
                self._async_clients[loop] = self._config.create_async_client()
            return self._async_clients[loop]

    @property
    def recreate(self) -> "Callable[[], OpenAI] | None":
        """Creates an equal blocking client after this one was closed; None if the client was given."""
        return None if self._given_client is not None else self._config.create_client

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    async def aclose(self) -> None:
        import asyncio

        self.close()
        with self._lock:
            self._drop_closed_loops()
            client = self._async_clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    def _drop_closed_loops(self) -> None:
        """A client refers to its loop, and its connections are open until it is dropped."""
        for loop in [each for each in self._async_clients if each.is_closed()]:
            thread = threading.Thread(target=_mark_closed, args=[self._async_clients.pop(loop)])
            thread.start()
            thread.join()


def _mark_closed(client: "AsyncOpenAI") -> None:
    """Close a client whose loop is closed. Otherwise its finalizer would try to, in any loop that runs then."""
    import asyncio

    with suppress(RuntimeError):  # its connections are closed by the garbage collector
        asyncio.run(client.close())


def _is_async_client(client: object) -> bool:
    return inspect.iscoroutinefunction(getattr(client, "close", None))
