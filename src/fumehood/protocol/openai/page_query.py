"""Which part of a list somebody wants, and what of it was found."""

from collections.abc import Sequence

import msgspec


class PageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a list a caller wants: at most `limit` of those between two ids, which are not part of it.

    Whoever is asked for a window gives at most one more than its limit, so that the caller knows whether there are
    more; an id that is not in the list is an InvalidRequest that names `after` or `before`.
    """

    limit: int = 20
    after: str | None = None
    before: str | None = None
    newest_first: bool = True


def trim_page[T](query: PageQuery, found: Sequence[T]) -> tuple[Sequence[T], bool]:
    """What belongs into the window, and whether there is more."""
    return found[: query.limit], len(found) > query.limit
