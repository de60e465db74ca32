"""A process that decodes pictures: `python -m draftwing.images.sandbox FD` reads jobs from a socket. It limits itself,
and the system ends it."""

from __future__ import annotations

import json
import pickle
import sys
from multiprocessing.connection import Connection

from draftwing.errors import RequestError
from draftwing.images.decode import pieces_of
from draftwing.images.processing import MEMORY, SECONDS
from draftwing.machine import yield_processors
from draftwing.text.sandbox import DONE, LIMIT, REFUSED, serve

# Of its priority: beside a thread of the engine it has a tenth of a processor, and any that is idle.
NICE = 10


def answer(data: memoryview) -> tuple[bytes, list[bytes]]:
    """data: a pickled (processor, encoded picture) -> how the job ended, and what `reader.read` reads or the
    error."""
    processor, picture = pickle.loads(data)
    try:
        pieces = pieces_of(picture, processor)
    except RequestError as error:
        return REFUSED, [str(error)[:500].encode(errors="replace")]
    except MemoryError:
        return LIMIT, [f"takes more than {MEMORY >> 20} MiB of memory".encode()]
    head = [piece if isinstance(piece, str) else (piece.width, piece.height, piece.grid) for piece in pieces]
    pixels = [bytes(piece.pixels) for piece in pieces if not isinstance(piece, str)]
    return DONE, [json.dumps(head).encode(), b"\n", *pixels]


if __name__ == "__main__":
    yield_processors(NICE)
    serve(Connection(int(sys.argv[1])), answer, SECONDS, MEMORY)
