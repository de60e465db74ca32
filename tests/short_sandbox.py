"""The process that decodes pictures, which ends after a second of a processor in place of ten."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from draftwing.images.processing import MEMORY
from draftwing.images.sandbox import answer
from draftwing.text.sandbox import serve

SECONDS = 1.0

if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), answer, SECONDS, MEMORY)
