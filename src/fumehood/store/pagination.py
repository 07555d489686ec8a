"""Pages of long lists, ordered by time and id."""

import sqlite3
from collections.abc import Mapping

from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.pagination import PageQuery


def select_page(
    db: sqlite3.Connection, table: str, where: str, values: Mapping[str, object], query: PageQuery
) -> list[tuple[str, bytes]]:
    """Return `id` and `record` of one row more than the page has.

    table: with the columns `created_at` and `id`, and an index on the columns of `where` followed by these two.
    where, values: the rows of the list.

    Raises InvalidRequest if the cursor is unknown.
    """
    bounds = dict(values)
    conditions = [where]
    for param, cursor in (("after", query.after), ("before", query.before)):
        if not cursor:
            continue
        bounds[f"{param}_time"], bounds[f"{param}_id"] = _find_cursor(db, table, where, values, cursor, param)
        side = ">" if (param == "after") != query.newest_first else "<"
        conditions.append(f"(created_at, id) {side} (:{param}_time, :{param}_id)")
    direction = "DESC" if query.newest_first else "ASC"
    found = db.execute(
        f"SELECT id, record FROM {table} WHERE {' AND '.join(conditions)}"  # noqa: S608
        f" ORDER BY created_at {direction}, id {direction} LIMIT {query.limit + 1:d}",
        bounds,
    )
    return found.fetchall()


def _find_cursor(
    db: sqlite3.Connection, table: str, where: str, values: Mapping[str, object], cursor: str, param: str
) -> tuple[float, str]:
    try:
        found = db.execute(
            f"SELECT created_at, id FROM {table} WHERE id = :cursor AND {where}",  # noqa: S608
            {**values, "cursor": cursor},
        ).fetchone()
    except UnicodeEncodeError:  # not valid UTF-8
        found = None
    if found is None:
        raise InvalidRequest(f"'{param}' names nothing in this list.", param=param, code="invalid_value")
    return found
