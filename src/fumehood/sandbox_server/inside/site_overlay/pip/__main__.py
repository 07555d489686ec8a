"""`python -m pip`."""

import importlib
import sys

if __name__ == "__main__":
    sys.exit(importlib.import_module("pip").main())
