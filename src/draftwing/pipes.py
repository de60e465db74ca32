"""Large messages between processes of our own."""

from __future__ import annotations

import os
import struct
from multiprocessing.connection import Connection

_LONG = -1  # in place of a length that has no room in four bytes


def receive(connection: Connection, most: int | None = None) -> memoryview:
    """Returns the next message, [n] bytes that are the caller's alone, as `Connection.recv_bytes` does. That asks for
    all that is left at each read, and makes a buffer for it: pixels of a picture take several times as long, and so do
    other threads, which wait for the interpreter's lock at each.

    Raises EOFError where the other side is gone, OSError in the middle of a message, or for one of more than `most`."""
    (size,) = struct.unpack("!i", _read(connection, 4, True))
    if size == _LONG:
        (size,) = struct.unpack("!Q", _read(connection, 8))
    if size < 0:
        raise OSError(f"a message of {size} bytes: expected at least 0")
    if most is not None and size > most:
        raise OSError(f"a message of {size} bytes: expected at most {most}")
    return _read(connection, size)


def _read(connection: Connection, size: int, may_end: bool = False) -> memoryview:
    """may_end: whether the other side may be gone before it."""
    out, done = memoryview(bytearray(size)), 0
    while done < size:
        count = os.readv(connection.fileno(), [out[done:]])
        if not count:
            raise EOFError if may_end and not done else OSError("the other side is gone in the middle of a message")
        done += count
    return out
