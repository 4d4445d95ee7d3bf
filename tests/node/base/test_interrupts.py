"""Ctrl-C ends a command, even if Python swallows the exception."""

import contextlib
import signal

import pytest

from farandole.node.base.interrupts import interruptible


def test_ctrl_c_ends_the_block_and_nothing_else() -> None:
    before = signal.getsignal(signal.SIGINT)
    is_past = False
    with interruptible():
        signal.raise_signal(signal.SIGINT)
        is_past = True
    assert not is_past
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_that_is_swallowed_is_seen_at_the_next_look() -> None:
    with interruptible() as interruption:
        with contextlib.suppress(KeyboardInterrupt):  # as Python does in a finaliser
            signal.raise_signal(signal.SIGINT)
        assert interruption.wait(0)
        assert interruption.wait(3_600)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_interrupt_ends_a_wait_and_the_second_one_the_block(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interruptible(is_gentle=True) as interruption:
        assert not interruption.wait(0)
        signal.raise_signal(number)
        assert interruption.wait(3_600)
        assert interruption.wait(3_600)  # whoever asks again hears it again
        signal.raise_signal(number)
    assert signal.getsignal(number) is before
