"""`python -m runtime.commands`: the same as `hotexpert`."""

from __future__ import annotations

import sys

from runtime.commands import main

if __name__ == "__main__":
    sys.exit(main())
