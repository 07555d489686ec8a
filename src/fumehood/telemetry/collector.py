"""Takes no more of a collector's answer than it has to; imports requests and its urllib3."""

import time
from typing import Any, override

import requests
from urllib3.exceptions import HTTPError

_MOST_BYTES = 64 << 10
_PIECE = 4 << 10
_USUAL_SECONDS = 10.0


class CollectorSession(requests.Session):
    """One for the SDK's exporters, which look at the status and the headers of an answer alone. The rest is read as far
    as it is short and comes soon, so that the connection can be used again; else it is hung up.
    """

    @override
    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        answer = super().send(request, **{**options, "stream": True})
        timeout = options.get("timeout")
        until = time.monotonic() + (timeout if isinstance(timeout, int | float) else _USUAL_SECONDS)
        left = _MOST_BYTES
        try:
            while left > 0 and time.monotonic() < until:
                piece = answer.raw.read1(_PIECE, decode_content=False)
                if not piece:
                    return answer
                left -= len(piece)
        except (HTTPError, OSError):
            pass  # what matters has been said
        answer.close()
        return answer
