"""Pagination of lists with OpenAI's `after`, `before`, `limit` and `order`."""

from collections.abc import Callable, Sequence

from msgspec import Raw

from fumehood.gateway.gateway_exchange import GatewayExchange
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.pagination import HasId, PageQuery, trim_page
from fumehood.protocol.openai.responses import ListPage

_DEFAULT_LIMIT = 20
_MAX_LIMIT = 100


def parse_page_query(
    exchange: GatewayExchange, *, default: int = _DEFAULT_LIMIT, maximum: int = _MAX_LIMIT
) -> PageQuery:
    """Parse the pagination parameters. Raises InvalidRequest."""
    return PageQuery(
        limit=_parse_limit(exchange.query_parameter("limit"), default, maximum),
        after=exchange.query_parameter("after") or None,
        before=exchange.query_parameter("before") or None,
        newest_first=_is_newest_first(exchange),
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


def _is_newest_first(exchange: GatewayExchange) -> bool:
    order = exchange.query_parameter("order") or "desc"
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
