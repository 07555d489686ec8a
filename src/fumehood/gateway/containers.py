"""/v1/containers/…/files: what code has left, for the client to fetch; imports `interfaces`, `protocol`, siblings."""

from msgspec import Raw

from fumehood.gateway.downloads import Download, send_download
from fumehood.gateway.exchange import Exchange, encode
from fumehood.gateway.listing import page
from fumehood.interfaces import Caller, Containers
from fumehood.protocol.containers import file_on_the_wire


class ContainerFiles:
    def __init__(self, containers: Containers) -> None:
        self._containers = containers

    async def list(self, exchange: Exchange, caller: Caller) -> None:
        records = await self._containers.files(caller, exchange.parameters["container_id"])
        rows = [(record.id, record) for record in records]
        await exchange.answer_json(page(exchange, rows, lambda record: Raw(encode(file_on_the_wire(record)))))

    async def get(self, exchange: Exchange, caller: Caller) -> None:
        names = exchange.parameters
        record = await self._containers.file(caller, names["container_id"], names["file_id"])
        await exchange.answer_json(file_on_the_wire(record))

    async def content(self, exchange: Exchange, caller: Caller) -> None:
        container_id, file_id = exchange.parameters["container_id"], exchange.parameters["file_id"]
        record = await self._containers.file(caller, container_id, file_id)
        await send_download(
            exchange,
            Download(record.path, lambda _start, _end: self._containers.read(caller, container_id, file_id)),
        )
