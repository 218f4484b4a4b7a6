"""Signals: at once, or after the present step; the second one insists."""

import os
import signal
from collections.abc import Iterator

import pytest

from tasks.stage.interrupts import SIGNALS, Interrupts


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    listening = Interrupts()
    listening.install()
    yield listening
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_outside_a_loop_it_ends_at_once(interrupts: Interrupts, number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_in_a_loop_the_step_is_finished_first(
    interrupts: Interrupts, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    steps = []

    def loop() -> None:
        with interrupts.deferred():
            for step in range(3):
                if step == 1:
                    os.kill(os.getpid(), number)
                steps.append(step)
                interrupts.leave()

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert steps == [0, 1]
    assert "stopping when this step is done and saved" in capfd.readouterr().err


def test_the_second_signal_ends_at_once(interrupts: Interrupts) -> None:
    def step() -> None:
        with interrupts.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            assert interrupts.is_requested()
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("went on")

    with pytest.raises(KeyboardInterrupt):
        step()


def test_a_loop_that_ends_by_itself_leaves_then(interrupts: Interrupts) -> None:
    def last_step() -> None:
        with interrupts.deferred():
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        last_step()
