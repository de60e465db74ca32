"""`python -m draftwing ...` is `draftwing ...`."""

from __future__ import annotations

import sys

from draftwing.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
