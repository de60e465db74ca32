"""`python -m draftwing.launch_server ...` is `draftwing serve ...`."""

from __future__ import annotations

import sys

from draftwing.cli.command import main

if __name__ == "__main__":
    sys.exit(main("serve"))
