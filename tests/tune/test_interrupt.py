"""Signals end the measuring, wait while something is kept, and are as before afterwards."""

from __future__ import annotations

import signal
import threading

import pytest

from tilewright.tune.interrupt import Interrupted, interruptible


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=number.name), interruptible():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_a_signal_waits_for_what_is_shielded() -> None:
    done = []
    with interruptible() as shield:
        with pytest.raises(Interrupted):
            with shield():
                signal.raise_signal(signal.SIGTERM)
                done.append("kept")
        with shield(ignoring=True):
            signal.raise_signal(signal.SIGTERM)
        with shield():
            done.append("and on")
    assert done == ["kept", "and on"]


def test_a_handler_of_the_program_stays() -> None:
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        with interruptible():
            signal.raise_signal(signal.SIGTERM)
        assert heard == [1]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_has_nothing_to_handle() -> None:
    entered = []

    def run() -> None:
        with interruptible():
            entered.append(1)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert entered == [1]
