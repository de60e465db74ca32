"""Signals that end a server, or have it read its keys again."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

AGAIN_SECONDS = 0.01  # until a signal is sent again, so that the main thread has left what dropped it


class Hangup:
    """What SIGHUP means: that the terminal was closed, or, where the server `reloads` something, that it shall."""

    def __init__(self, reloads: bool = False) -> None:
        self.reloads = reloads
        self._terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()  # not under nohup

    @property
    def ends(self) -> bool:
        """Returns whether the server is to end."""
        return not self.reloads or (self._terminal and not _has_terminal())


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
        return True
    except OSError:
        return False


@contextlib.contextmanager
def terminable(hangup: Hangup | None = None) -> Iterator[None]:
    """SIGTERM and SIGHUP, unless `hangup` knows better, raise SystemExit, SIGINT KeyboardInterrupt, so that what is to
    be cleaned up is. Other errors that come of a signal end the block in the same way. SIGHUP may be ignored."""
    received: list[int] = []

    def ending() -> BaseException:
        return KeyboardInterrupt() if received[0] == signal.SIGINT else SystemExit(128 + received[0])

    def leave(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and hangup is not None and not hangup.ends:
            return  # the keys are read later anyway
        received.append(number)
        raise ending()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(never_dropped())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            stack.enter_context(handled(number, leave))
        try:
            yield
        except Exception:
            # Python may be where it makes other errors of what a handler raises, as in the body of a class.
            if received:
                raise ending() from None
            raise
        if received:  # and dropped so late that the block ended before it was sent again
            raise ending()


@contextlib.contextmanager
def never_dropped() -> Iterator[None]:
    """Sends a signal again whose exception Python drops: it prints what a handler raises in a destructor or in the
    callback of a weak reference, of which each import has one, and goes on. On the main thread."""
    main, before, ended = threading.current_thread(), sys.unraisablehook, threading.Event()

    def send(number: int) -> None:
        time.sleep(AGAIN_SECONDS)
        if not ended.is_set():
            assert main.ident is not None
            signal.pthread_kill(main.ident, number)

    def dropped(what: sys.UnraisableHookArgs) -> None:
        number = _number_of(what.exc_value)
        if number is None or threading.current_thread() is not main:
            before(what)
            return
        while True:
            try:
                _thread.start_new_thread(send, (number,))  # a `Thread` would be waited for, until the signal is there
                return
            except (KeyboardInterrupt, SystemExit):
                pass  # on a busy machine it may come as early as here, where it would be dropped once more

    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = before
        ended.set()


def _number_of(error: BaseException | None) -> int | None:
    """Returns the signal that raises such an error by `terminable` or by Python's own handler."""
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    if isinstance(error, SystemExit):
        return next((number for number in (signal.SIGTERM, signal.SIGHUP) if error.code == 128 + number), None)
    return None


@contextlib.contextmanager
def handled(number: int, by: Callable[[int, FrameType | None], None], always: bool = False) -> Iterator[None]:
    """Has a signal handled so meanwhile, unless it is ignored. On the main thread. always: even then."""
    before = signal.getsignal(number)
    if always or before is not signal.SIG_IGN:
        signal.signal(number, by)
    try:
        yield
    finally:
        signal.signal(number, before)
