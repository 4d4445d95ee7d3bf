from __future__ import annotations

from farandole.testnet.play.vacancies import Vacancies


def test_a_stage_counts_from_the_first_time_that_it_is_held() -> None:
    vacancies = Vacancies()
    assert vacancies.observe({0}, 0.0) == []
    assert vacancies.observe({0, 1}, 50.0) == []
    assert vacancies.problems(10.0, 50.0) == []


def test_an_empty_stage_is_told_and_so_is_its_end() -> None:
    vacancies = Vacancies()
    vacancies.observe({0, 1, 2}, 0.0)
    assert vacancies.observe({0, 2}, 10.0) == ["nobody holds stage 1"]
    assert vacancies.observe({0, 2}, 20.0) == []
    assert vacancies.problems(15.0, 24.0) == []
    assert vacancies.problems(15.0, 26.0) == ["nobody held stage 1 for 16 s, more than 15 s"]
    assert vacancies.observe({0, 1, 2}, 27.5) == ["stage 1 is held again, 17.5 s later"]
    assert vacancies.seconds == {1: 17.5}
    assert vacancies.problems(15.0, 90.0) == ["nobody held stage 1 for 18 s, more than 15 s"]
