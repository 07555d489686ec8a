"""Parts of lists that are too long to be read whole, by time and id; imports `protocol` and the standard library."""

import sqlite3
from collections.abc import Mapping

from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.listing import Window


def records(
    db: sqlite3.Connection, table: str, where: str, values: Mapping[str, object], window: Window
) -> list[tuple[str, bytes]]:
    """The columns `id` and `record` of those rows that are in the window; the table has `created_at` and `id`, and an
    index that ends with them after what `where` asks for. Raises InvalidRequest.
    """
    bounds = dict(values)
    conditions = [where]
    for param, cursor in (("after", window.after), ("before", window.before)):
        if not cursor:
            continue
        bounds[f"{param}_time"], bounds[f"{param}_id"] = _place(db, table, where, values, cursor, param)
        side = ">" if (param == "after") != window.newest_first else "<"
        conditions.append(f"(created_at, id) {side} (:{param}_time, :{param}_id)")
    way = "DESC" if window.newest_first else "ASC"
    found = db.execute(
        f"SELECT id, record FROM {table} WHERE {' AND '.join(conditions)}"  # noqa: S608
        f" ORDER BY created_at {way}, id {way} LIMIT {window.limit + 1:d}",
        bounds,
    )
    return found.fetchall()


def _place(
    db: sqlite3.Connection, table: str, where: str, values: Mapping[str, object], cursor: str, param: str
) -> tuple[float, str]:
    try:
        found = db.execute(
            f"SELECT created_at, id FROM {table} WHERE id = :cursor AND {where}",  # noqa: S608
            {**values, "cursor": cursor},
        ).fetchone()
    except UnicodeEncodeError:  # what is no text names nothing
        found = None
    if found is None:
        raise InvalidRequest(f"'{param}' names nothing in this list.", param=param, code="invalid_value")
    return found
