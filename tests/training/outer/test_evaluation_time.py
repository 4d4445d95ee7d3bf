from __future__ import annotations

from farandole.training.base.errors import DataError
from farandole.training.outer.partner import EvaluationTime
from farandole.training.screening.rule import EVALUATION_BATCHES, EVALUATION_SECONDS


class Machine:
    """Evaluates a batch in ``seconds``, by a clock of its own."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.num_evaluated = 0
        self.time = EvaluationTime(lambda: self.now)

    def evaluate(self, num_batches: int) -> float:
        self.num_evaluated += num_batches
        self.now += num_batches * self.seconds
        return 1.0

    def contributions(self, number: int) -> list[int]:
        """Return the number of batches for each of so many contributions, with one loss each."""
        found = []
        for _ in range(number):
            self.time.begin()
            found.append(self.time.num_batches(self.evaluate))
            assert self.time.num_batches(self.evaluate) == found[-1], "one number for all losses of a contribution"
            if found[-1]:
                self.time.timed(self.evaluate, found[-1])
        return found


def test_a_machine_that_was_busy_at_first_is_not_slow_for_ever() -> None:
    machine = Machine(2.0 * EVALUATION_SECONDS)
    assert set(machine.contributions(8)) == {0}
    machine.seconds = 0.1 * EVALUATION_SECONDS
    assert machine.contributions(8)[-1] == EVALUATION_BATCHES


def test_a_partner_does_not_wait_for_a_machine_that_is_far_too_slow() -> None:
    machine = Machine(100 * EVALUATION_SECONDS)
    assert set(machine.contributions(20)) == {0}
    assert machine.num_evaluated == 2


def test_without_text_no_loss_is_known() -> None:
    def evaluate(num_batches: int) -> float:
        raise DataError("there is none")

    times = EvaluationTime()
    for _ in range(8):
        times.begin()
        assert times.num_batches(evaluate) == 0
