"""Pages of a list: `after`, `before`, `limit` and `order` as OpenAI's lists have them; imports `protocol`, siblings."""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Raw

from fumehood.gateway.exchange import Exchange
from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.listing import Window, in_window
from fumehood.protocol.responses import Page

_USUAL = 20
_MOST = 100


class Identified(Protocol):
    @property
    def id(self) -> str: ...


def asked_window(exchange: Exchange, *, usual: int = _USUAL, most: int = _MOST) -> Window:
    """The part of a list that the query asks for; raises InvalidRequest."""
    return Window(
        limit=_limit(exchange.query("limit"), usual, most),
        after=exchange.query("after") or None,
        before=exchange.query("before") or None,
        newest_first=_newest_first(exchange),
    )


def windowed_page[T: Identified](window: Window, found: Sequence[T], show: Callable[[T], Raw]) -> Page:
    """The page of what was found in a window."""
    chosen, has_more = in_window(window, found)
    return Page(
        data=[show(one) for one in chosen],
        first_id=chosen[0].id if chosen else None,
        last_id=chosen[-1].id if chosen else None,
        has_more=has_more,
    )


def page[T](exchange: Exchange, rows: Sequence[tuple[str, T]], show: Callable[[T], Raw]) -> Page:
    """The page that the query asks for, of rows that come oldest first with their ids; newest first by default."""
    limit = _limit(exchange.query("limit"), _USUAL, _MOST)
    ordered = rows[::-1] if _newest_first(exchange) else rows
    ids = [row[0] for row in ordered]
    start = _place(ids, exchange.query("after"), "after")
    end = _place(ids, exchange.query("before"), "before")
    first = 0 if start is None else start + 1
    rest = ordered[first:end]
    chosen = rest[:limit]
    return Page(
        data=[show(row[1]) for row in chosen],
        first_id=chosen[0][0] if chosen else None,
        last_id=chosen[-1][0] if chosen else None,
        has_more=len(rest) > limit,
    )


def _newest_first(exchange: Exchange) -> bool:
    order = exchange.query("order") or "desc"
    if order not in ("asc", "desc"):
        raise InvalidRequest("'order' is 'asc' or 'desc'.", param="order", code="invalid_value")
    return order == "desc"


def _limit(text: str | None, usual: int, most: int) -> int:
    if text is None:
        return usual
    if not (text.isascii() and text.isdecimal()) or len(text) > 6 or not 1 <= int(text) <= most:
        raise InvalidRequest(f"'limit' is a number from 1 to {most}.", param="limit", code="invalid_value")
    return int(text)


def _place(ids: Sequence[str], wanted: str | None, param: str) -> int | None:
    if not wanted:
        return None
    try:
        return ids.index(wanted)
    except ValueError:
        raise InvalidRequest(
            f"'{param}' names nothing in this list.", param=param, code="invalid_value"
        ) from None
