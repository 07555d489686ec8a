"""Routes of /v1/models."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from fumehood.gateway.request_context import RequestContext
from fumehood.interfaces import Caller, ModelProvider
from fumehood.protocol.model_turns import ModelCard
from fumehood.protocol.openai.api_errors import NotFound


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: Sequence[ModelCard]


class ModelRoutes:
    """Handlers of /v1/models."""

    def __init__(self, models: ModelProvider) -> None:
        self._models = models

    async def list(self, context: RequestContext, caller: Caller) -> None:
        del caller
        await context.respond_json(ModelList(data=await self._models.list_models()))

    async def get(self, context: RequestContext, caller: Caller) -> None:
        del caller
        wanted = context.path_parameters["model"]
        for card in await self._models.list_models():
            if card.id == wanted:
                await context.respond_json(card)
                return
        raise NotFound(
            f"The model {wanted[:256]!r} does not exist; GET /v1/models lists the models.",
            param="model",
            code="model_not_found",
        )
