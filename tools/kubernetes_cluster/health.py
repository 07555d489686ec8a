"""Asks the components of the node how they are."""

import http.client
import socket
import ssl
from pathlib import Path
from urllib.parse import urlsplit


def answers(url: str) -> bool:
    """Whether it is well; nothing is sent to it and nothing of it is believed, so its certificate does not matter."""
    parts = urlsplit(url)
    assert parts.hostname
    if parts.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=5, context=context)
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=5)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def listens(path: Path) -> bool:
    """Whether somebody accepts connections on this socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(path)) == 0
