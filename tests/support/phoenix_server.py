"""Starts arize-phoenix in the environment that it is installed in, on this machine alone.

Its gRPC server would listen on every address, and no setting tells it not to.
"""

import sys
from importlib import import_module
from typing import Any


def main() -> int | None:
    server: Any = import_module("grpc.aio").Server
    anywhere = server.add_insecure_port

    def here(own: object, address: str) -> int:
        return anywhere(own, address.replace("[::]", "127.0.0.1"))

    server.add_insecure_port = here
    return import_module("phoenix.server.main").main()


if __name__ == "__main__":
    sys.exit(main())
