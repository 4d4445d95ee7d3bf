"""What is wrong with releases that do not fit together, or with a clock, and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from farandole.protocol.run.releases import ReleaseConflict
from farandole.protocol.state.believing import ClockSkew

# A peer says its release itself, so a line names few.
MAX_NAMED: Final = 3
_HOW: Final = "docs/volunteer.md#upgrade"


def release_words(conflict: ReleaseConflict, own: str) -> tuple[str, str]:
    """Return what is wrong, and what to do about it; ``own``: this node's release."""
    peers = (*conflict.older, *conflict.newer)
    number = "1 connected peer runs" if len(peers) == 1 else f"{len(peers)} connected peers run"
    text = f"{number} {releases(peers, own)}; this node runs {own}, and the two cannot average"
    if conflict.newer and conflict.older:
        return text, f"use one release everywhere, the newest: {_HOW}"
    if conflict.newer:
        return text, f"this node's release is the older one: upgrade this node ({_HOW})"
    return text, f"theirs is the older one: ask their owners to upgrade ({_HOW}); this node has nothing to do"


def releases(versions: Sequence[str], own: str) -> str:
    """Return the distinct releases as text, at most `MAX_NAMED` of them."""
    distinct = sorted(set(versions))
    known = [f"another farandole {own}" if name == own else f"farandole {name}" for name in distinct if name]
    named = known if len(known) == len(distinct) else [*known, "a farandole that does not say its release"]
    more = ["others"] if len(named) > MAX_NAMED else []
    *first, last = [*named[:MAX_NAMED], *more]
    return f"{', '.join(first)} and {last}" if first else last


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
