"""Pagination of lists with OpenAI's `after`, `before`, `limit` and `order`."""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Raw

from fumehood.gateway.request_context import RequestContext
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.page_query import PageQuery, trim_page
from fumehood.protocol.openai.responses import ListPage

_DEFAULT_LIMIT = 20
_MAX_LIMIT = 100


class HasId(Protocol):
    @property
    def id(self) -> str: ...


def parse_page_query(
    context: RequestContext, *, default: int = _DEFAULT_LIMIT, maximum: int = _MAX_LIMIT
) -> PageQuery:
    """Parse the pagination parameters. Raises InvalidRequest."""
    return PageQuery(
        limit=_parse_limit(context.query_parameter("limit"), default, maximum),
        after=context.query_parameter("after") or None,
        before=context.query_parameter("before") or None,
        newest_first=_is_newest_first(context),
    )


def make_page[T: HasId](query: PageQuery, found: Sequence[T], render: Callable[[T], Raw]) -> ListPage:
    """The page of objects that were found for a query."""
    chosen, has_more = trim_page(query, found)
    return ListPage(
        data=[render(each) for each in chosen],
        first_id=chosen[0].id if chosen else None,
        last_id=chosen[-1].id if chosen else None,
        has_more=has_more,
    )


def paginate[T](
    context: RequestContext, rows: Sequence[tuple[str, T]], render: Callable[[T], Raw]
) -> ListPage:
    """The page that the request asks for, of rows with ids, oldest first. Raises InvalidRequest."""
    limit = _parse_limit(context.query_parameter("limit"), _DEFAULT_LIMIT, _MAX_LIMIT)
    ordered = rows[::-1] if _is_newest_first(context) else rows
    ids = [row[0] for row in ordered]
    start = _find_index(ids, context.query_parameter("after"), "after")
    end = _find_index(ids, context.query_parameter("before"), "before")
    first = 0 if start is None else start + 1
    rest = ordered[first:end]
    chosen = rest[:limit]
    return ListPage(
        data=[render(row[1]) for row in chosen],
        first_id=chosen[0][0] if chosen else None,
        last_id=chosen[-1][0] if chosen else None,
        has_more=len(rest) > limit,
    )


def _is_newest_first(context: RequestContext) -> bool:
    order = context.query_parameter("order") or "desc"
    if order not in ("asc", "desc"):
        raise InvalidRequest("'order' must be 'asc' or 'desc'.", param="order", code="invalid_value")
    return order == "desc"


def _parse_limit(text: str | None, default: int, maximum: int) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > 6 or not 1 <= int(text) <= maximum:
        raise InvalidRequest(
            f"'limit' must be a number from 1 to {maximum}.", param="limit", code="invalid_value"
        )
    return int(text)


def _find_index(ids: Sequence[str], wanted: str | None, param: str) -> int | None:
    if not wanted:
        return None
    try:
        return ids.index(wanted)
    except ValueError:
        raise InvalidRequest(
            f"'{param}' is not the id of an object in this list.", param=param, code="invalid_value"
        ) from None
