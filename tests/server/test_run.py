"""How a signal ends what runs; tests/cli/test_main.py has whole servers."""

from __future__ import annotations

import signal
import time
import weakref
from collections.abc import Iterator

import pytest

from draftwing.server import signals
from draftwing.server.signals import terminable


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """As Python has it; it is ignored where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_whatever_runs(ctrl_c: None, hangups: None, number: int) -> None:
    """Python 3.11 makes a RuntimeError of what is raised in `__set_name__`; a library may raise its own error after it
    caught everything; what is raised in a destructor or in the callback of a weak reference is printed and dropped."""

    class Destroyed:
        def __del__(self) -> None:
            signal.raise_signal(number)

    class Target:
        pass

    def destroyed() -> None:
        Destroyed()
        time.sleep(10)

    def called_back() -> None:
        target = Target()
        reference = weakref.ref(target, lambda _: signal.raise_signal(number))
        del target
        time.sleep(10)
        del reference

    class Named:
        def __set_name__(self, owner: object, name: str) -> None:
            signal.raise_signal(number)

    def caught() -> None:
        try:
            signal.raise_signal(number)
        except BaseException:
            raise OSError("interrupted") from None

    before = signal.getsignal(number)
    for block in (lambda: type("Owner", (), {"named": Named()}), caught, destroyed, called_back):
        with pytest.raises((KeyboardInterrupt, SystemExit)) as ended, terminable():
            block()
        assert isinstance(ended.value, KeyboardInterrupt) == (number == signal.SIGINT)
        assert number == signal.SIGINT or ended.value.code == 128 + number
    assert signal.getsignal(number) is before
    with pytest.raises(ValueError), terminable():
        raise ValueError("no signal")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_sent_again_as_often_as_it_is_dropped(
    ctrl_c: None, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it comes again before whoever sends it has gone on: here at once, and into two destructors."""
    monkeypatch.setattr(signals, "AGAIN_SECONDS", 0)

    class Destroyed:
        def __del__(self) -> None:
            signal.raise_signal(number)

    for _ in range(100):
        begun = time.monotonic()
        with pytest.raises((KeyboardInterrupt, SystemExit)), terminable():
            Destroyed()
            Destroyed()
            while time.monotonic() < begun + 5:
                time.sleep(0.001)
        assert time.monotonic() < begun + 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_not_lost_that_is_dropped_last(ctrl_c: None, number: int) -> None:
    class Destroyed:
        def __del__(self) -> None:
            signal.raise_signal(number)

    with pytest.raises((KeyboardInterrupt, SystemExit)), terminable():
        Destroyed()
