"""Ctrl-C ends a command, even if Python swallows the exception."""

import contextlib
import signal

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
        assert interruption.is_set()
        assert interruption.wait(3_600)
