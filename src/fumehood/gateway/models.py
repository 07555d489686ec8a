"""/v1/models: what can be asked for; imports `interfaces`, `protocol` and siblings."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from fumehood.gateway.exchange import Exchange
from fumehood.interfaces import Caller, Models
from fumehood.protocol.errors import NotFound
from fumehood.protocol.models import ModelCard


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: Sequence[ModelCard]


class ModelCards:
    """/v1/models: which models can be asked for."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def list(self, exchange: Exchange, caller: Caller) -> None:
        del caller
        await exchange.answer_json(ModelList(data=await self._models.cards()))

    async def get(self, exchange: Exchange, caller: Caller) -> None:
        del caller
        wanted = exchange.parameters["model"]
        for card in await self._models.cards():
            if card.id == wanted:
                await exchange.answer_json(card)
                return
        raise NotFound(
            f"The model {wanted[:256]!r} does not exist here; GET /v1/models lists those that do.",
            param="model",
            code="model_not_found",
        )
