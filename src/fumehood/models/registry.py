"""All models, by the names that clients use; imports `interfaces`, siblings and the standard library."""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Protocol

from fumehood.figures import TurnFigures
from fumehood.interfaces import Clock, ModelBackend
from fumehood.models.chat_completions import ChatCompletions
from fumehood.models.direct import DirectModel
from fumehood.models.responses_api import ResponsesApi
from fumehood.models.retrying import Retrying
from fumehood.models.settings import ModelSettings
from fumehood.models.upstream import Upstream
from fumehood.protocol.errors import InvalidRequest, ModelError
from fumehood.protocol.models import ModelCard
from fumehood.protocol.names import clean_name

logger = logging.getLogger(__name__)

_OWNER = "fumehood"
_LIST_SECONDS = 60.0  # how long a server's list of models is believed
_LIST_PATIENCE = 5.0  # how long anybody waits for it


class Catalogue(Protocol):
    """Who can say which models there are."""

    async def cards(self) -> Sequence[ModelCard]:
        """Raises ModelError."""
        ...


@dataclass(slots=True, eq=False)
class Rule:
    """The backend of all names that fit `match`, unless an earlier rule has them.

    name: under which a pattern is listed; catalogue: who is asked for more, for a pattern.
    """

    match: str
    backend: ModelBackend
    name: str | None = None
    catalogue: Catalogue | None = None
    listed: Sequence[ModelCard] = ()
    listed_at: float | None = None
    listing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def fits(self, model: str) -> bool:
        return self.match == "*" or fnmatchcase(model, self.match)


class Registry:
    """`Models` by rules, of which the first that fits decides."""

    def __init__(self, rules: Sequence[Rule], clock: Clock, upstream: Upstream | None = None) -> None:
        self._rules = rules
        self._clock = clock
        self._upstream = upstream
        self._started = int(clock.now())

    def backend(self, model: str) -> ModelBackend:
        rule = self._rule(model)
        if rule is None:
            raise InvalidRequest(
                f"The model '{clean_name(model)}' does not exist; GET /v1/models lists those that do.",
                param="model",
                code="model_not_found",
            )
        return rule.backend

    async def cards(self) -> Sequence[ModelCard]:
        found = await asyncio.gather(*(self._cards_of(rule) for rule in self._rules))
        cards: dict[str, ModelCard] = {}
        for rule, listed in zip(self._rules, found, strict=True):
            for card in listed:
                if self._rule(card.id) is rule:
                    cards.setdefault(card.id, card)
        return list(cards.values())

    async def close(self) -> None:
        for rule in self._rules:
            await rule.backend.close()
        if self._upstream is not None:
            await self._upstream.close()

    def _rule(self, model: str) -> Rule | None:
        for rule in self._rules:
            if rule.fits(model):
                return rule
        return None

    async def _cards_of(self, rule: Rule) -> Sequence[ModelCard]:
        own = [] if rule.name is None else [ModelCard(id=rule.name, created=self._started, owned_by=_OWNER)]
        if rule.catalogue is None:
            return own
        async with rule.listing:
            if rule.listed_at is None or self._clock.monotonic() - rule.listed_at >= _LIST_SECONDS:
                rule.listed = await self._asked(rule, rule.catalogue)
                rule.listed_at = self._clock.monotonic()
        return [*own, *rule.listed]

    async def _asked(self, rule: Rule, catalogue: Catalogue) -> Sequence[ModelCard]:
        """What the server lists; what it listed before, if it does not answer."""
        try:
            async with asyncio.timeout(_LIST_PATIENCE):
                return await catalogue.cards()
        except (ModelError, TimeoutError) as error:
            logger.warning("no list of models for %r: %s", rule.match, error or "no answer in time")
            return rule.listed


def open_models(
    entries: Sequence[ModelSettings],
    clock: Clock,
    environment: Mapping[str, str] | None = None,
    figures: dict[str, TurnFigures] | None = None,
) -> Registry:
    """The models of these settings, or `direct` for every name if there are none. Raises ValueError where a key is
    missing. Nothing is connected yet. `figures` are given those of every rule, by its pattern.
    """
    upstream = Upstream()
    variables = os.environ if environment is None else environment
    counted = {} if figures is None else figures
    if not entries:
        direct = Retrying(DirectModel(), 0, clock, figures=counted.setdefault("*", TurnFigures()))
        return Registry([Rule("*", direct, name="direct")], clock)
    rules = [
        _rule(settings, upstream, clock, variables, counted.setdefault(settings.match, TurnFigures()))
        for settings in entries
    ]
    return Registry(rules, clock, upstream)


def _rule(
    settings: ModelSettings,
    upstream: Upstream,
    clock: Clock,
    environment: Mapping[str, str],
    figures: TurnFigures,
) -> Rule:
    name = None if settings.is_pattern else settings.match
    if settings.backend == "direct":
        return Rule(settings.match, Retrying(DirectModel(), 0, clock, figures=figures), name=name)
    kind = ResponsesApi if settings.backend == "responses" else ChatCompletions
    server = kind(settings, upstream, settings.read_key(environment))
    backend = Retrying(server, settings.retries, clock, figures=figures)
    # A pattern whose names all mean one model has nothing to list.
    listable = settings.is_pattern and settings.name is None
    return Rule(settings.match, backend, name=name, catalogue=server if listable else None)
