"""`python -m pip`; imports only the standard library."""

import importlib
import sys

if __name__ == "__main__":
    sys.exit(importlib.import_module("pip").main())
