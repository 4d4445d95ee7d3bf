from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farandole.node.loop.idle_service import BEGIN_SECONDS, CALM_SECONDS, IdleWatch

STEP = 5.0
CALM, GAME = (), ("game (process 7)",)


class Story:
    """A watch that looks every `STEP` seconds of virtual time."""

    def __init__(self) -> None:
        self.watch = IdleWatch()
        self.now = 1_000.0
        self.look(CALM)

    def look(self, users: tuple[str, ...]) -> str:
        self.now += STEP
        return self.watch.look(False, users, self.now)

    def seconds_until(self, users: tuple[str, ...], *, is_resting: bool) -> float:
        """Return how long this has to be seen until the node rests, or trains."""
        began = self.now
        while bool(self.look(users)) != is_resting:
            assert self.now - began < 2 * CALM_SECONDS, "it never does"
        return self.now - began


def test_the_gpu_is_given_up_soon_and_taken_again_when_it_was_free_for_a_while() -> None:
    story = Story()
    assert story.seconds_until(GAME, is_resting=True) <= BEGIN_SECONDS["GPU"] + 2 * STEP
    words = story.look(GAME)
    assert "game (process 7)" in words
    assert "--only-when-idle" in words
    assert CALM_SECONDS <= story.seconds_until(CALM, is_resting=False) <= CALM_SECONDS + 2 * STEP


def test_a_glance_at_the_gpu_is_no_reason_to_rest() -> None:
    story = Story()
    for _ in range(10):
        assert not story.look(GAME)
        assert not story.look(CALM)


def test_a_short_calm_does_not_end_a_rest() -> None:
    story = Story()
    story.seconds_until(GAME, is_resting=True)
    for _ in range(10):
        for _ in range(int(CALM_SECONDS / STEP) - 1):
            assert story.look(CALM)
        assert story.look(GAME)


def test_what_is_so_from_the_beginning_needs_no_time_and_what_cannot_be_told_is_no_reason() -> None:
    assert "battery" in IdleWatch().look(True, (), 0.0)
    assert IdleWatch().look(None, GAME, 0.0)
    watch = IdleWatch()
    assert not any(watch.look(None, (), STEP * number) for number in range(100))


@given(st.lists(st.booleans(), max_size=400))
def test_it_never_flaps(uses: list[bool]) -> None:
    """Whatever other programs do, a rest lasts at least as long as the calm that it requires."""
    story = Story()
    resting, began = False, story.now
    for is_used in uses:
        now_resting = bool(story.look(GAME if is_used else CALM))
        if now_resting != resting:
            assert now_resting or story.now - began >= CALM_SECONDS
            resting, began = now_resting, story.now
