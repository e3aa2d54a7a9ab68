"""SIGTERM and one SIGINT ask to stop at the boundary; a second SIGINT aborts; handlers are put back."""

import os
import signal
import threading

import pytest

from paceline.launch.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_only_sets_the_flag(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        signal.sigpending()
        assert stop.requested and stop.signal_name == number.name


def test_repeated_sigterm_keeps_waiting_for_the_boundary() -> None:
    with StopRequest() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigpending()
        assert stop.requested


def test_a_second_sigint_aborts_at_once() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        signal.sigpending()
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigpending()


def test_handlers_are_put_back_also_after_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError), StopRequest():
        assert signal.getsignal(signal.SIGTERM) != before[0]
        raise ValueError
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_off_the_main_thread_nothing_is_installed_and_asking_by_call_works() -> None:
    seen: list[tuple[bool, bool]] = []

    def body() -> None:
        with StopRequest() as stop:
            stop.request()
            seen.append((stop.installed, stop.requested))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(False, True)]
