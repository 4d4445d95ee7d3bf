"""Texts about a wrong clock, for the terminal, the status and the doctor."""

from __future__ import annotations

from typing import Final

from farandole.protocol.state.clock_votes import ClockSkew

SET_CLOCK: Final = "set it, for example with `timedatectl set-ntp true`"
COMPARE_CLOCKS: Final = "check the time on both; `timedatectl set-ntp true` sets it"


def describe_skew(seconds: float) -> str:
    """Describe the difference of a clock that is ahead by ``seconds``, or behind if that is negative."""
    size = abs(seconds)
    text = f"{size / 3_600:.1f} h" if size >= 7_200 else f"{size / 60:.0f} min" if size >= 120 else f"{size:.1f} s"
    return f"{text} {'ahead' if seconds > 0 else 'behind'}"


def clock_words(skew: ClockSkew) -> tuple[str, str]:
    """Return what is wrong with the clock, and the remedy."""
    difference = f"this machine's clock is {describe_skew(skew.seconds)}"
    if skew.is_agreed:
        return f"{difference}, as the clocks of {skew.num_members} members show", SET_CLOCK
    members = "the one member" if skew.num_members == 1 else f"all {skew.num_members} members"
    return f"{difference} compared with {members} that it reached: one of the clocks is wrong", COMPARE_CLOCKS
