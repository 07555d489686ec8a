"""Pagination of lists."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from fumehood.protocol.openai.api_errors import InvalidRequest


class HasId(Protocol):
    @property
    def id(self) -> str | None: ...


class PageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A page: at most `limit` entries between the ids `after` and `before`, both exclusive.

    A store returns one entry more than the limit if there are more. An id that is not in the list raises
    InvalidRequest, which names `after` or `before`.
    """

    limit: int = 20
    after: str | None = None
    before: str | None = None
    newest_first: bool = True


def find_page[T: HasId](query: PageQuery, entries: Sequence[T]) -> Sequence[T]:
    """Apply a query to all entries, oldest first, as a store does. Raises InvalidRequest."""
    ordered = entries[::-1] if query.newest_first else entries
    ids = [entry.id for entry in ordered]
    for param, cursor in (("after", query.after), ("before", query.before)):
        if cursor and cursor not in ids:
            raise InvalidRequest(f"'{param}' names nothing in this list.", param=param, code="invalid_value")
    start = ids.index(query.after) + 1 if query.after else 0
    end = ids.index(query.before) if query.before else None
    return ordered[start:end][: query.limit + 1]


def trim_page[T](query: PageQuery, found: Sequence[T]) -> tuple[Sequence[T], bool]:
    """Return the entries of the page, and whether there are more."""
    return found[: query.limit], len(found) > query.limit
