"""Pagination of lists."""

from collections.abc import Sequence

import msgspec


class PageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A page: at most `limit` entries between the ids `after` and `before`, both exclusive.

    A store returns one entry more than the limit if there are more. An id that is not in the list raises
    InvalidRequest, which names `after` or `before`.
    """

    limit: int = 20
    after: str | None = None
    before: str | None = None
    newest_first: bool = True


def trim_page[T](query: PageQuery, found: Sequence[T]) -> tuple[Sequence[T], bool]:
    """Return the entries of the page, and whether there are more."""
    return found[: query.limit], len(found) > query.limit
