"""`python -m runtime.server`: the HTTP server.  The only file of `runtime` that looks up to
`server`.
"""

from __future__ import annotations

import sys

from server.cli import main as main

if __name__ == "__main__":
    sys.exit(main())
