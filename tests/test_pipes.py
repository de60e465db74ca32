"""Messages between processes are what `multiprocessing.connection` sends."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe

import pytest

from draftwing import pipes
from draftwing.pipes import receive


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = Pipe()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("size", [0, 1, 16384, 16385, 3_000_001])
def test_messages_one_after_the_other(ends: tuple[Connection, Connection], size: int) -> None:
    ours, theirs = ends
    sent = [os.urandom(size), b"next", os.urandom(size)]
    sender = threading.Thread(target=lambda: [theirs.send_bytes(one) for one in sent])
    sender.start()
    assert [bytes(receive(ours, max(size, 4))) for _ in sent] == sent
    sender.join()
    theirs.send_bytes(b"last")
    assert ours.recv_bytes() == b"last", "nothing of it was read"


def test_a_length_of_eight_bytes(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    os.write(theirs.fileno(), struct.pack("!iQ", -1, 5) + b"words")
    assert receive(ours) == b"words"


def test_a_message_that_is_too_long(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    theirs.send_bytes(b"four")
    with pytest.raises(OSError, match="4 bytes: expected at most 3"):
        receive(ours, 3)


@pytest.mark.parametrize(
    ("sent", "error"), [(b"", EOFError), (b"\0\0", OSError), (struct.pack("!i", 3) + b"ab", OSError)]
)
def test_another_side_that_is_gone(ends: tuple[Connection, Connection], sent: bytes, error: type[Exception]) -> None:
    ours, theirs = ends
    os.write(theirs.fileno(), sent)
    theirs.close()
    with pytest.raises(error):
        receive(ours)


def test_a_message_is_the_callers_alone(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    theirs.send_bytes(b"one")
    found = pipes.receive(ours)
    found[0] = ord("O")
    theirs.send_bytes(b"two")
    assert (bytes(found), bytes(pipes.receive(ours))) == (b"One", b"two")


def test_a_message_of_less_than_nothing(ends: tuple[Connection, Connection]) -> None:
    """Of another side that writes anything."""
    ours, theirs = ends
    os.write(theirs.fileno(), struct.pack("!i", -2))
    with pytest.raises(OSError, match="-2 bytes"):
        receive(ours)
