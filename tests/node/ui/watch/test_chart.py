from __future__ import annotations

from farandole.node.ui.watch.panels import LABEL_WIDTH, plot


def test_a_falling_curve_falls_from_its_labelled_height_to_its_labelled_end() -> None:
    lines = plot([(0, 4.0), (1, 3.0), (2, 2.0)], LABEL_WIDTH + 4, 2)

    assert [line[:LABEL_WIDTH].strip() for line in lines] == ["4.000", "2.000"]
    assert [line[LABEL_WIDTH:] for line in lines] == ["⠙⢦⡀⠀", "⠀⠀⠙⢦"]


def test_a_curve_is_without_gaps_however_few_its_points() -> None:
    lines = plot([(0, 1.0), (100, 2.0)], LABEL_WIDTH + 30, 4)
    assert all(any(line[LABEL_WIDTH + column] != "⠀" for line in lines) for column in range(30))


def test_many_points_are_averaged_into_the_room_there_is() -> None:
    lines = plot([(x, float(x % 2)) for x in range(10_000)], LABEL_WIDTH + 10, 3)
    assert [len(line) for line in lines] == [LABEL_WIDTH + 10] * 3
    assert "0.5" in lines[0] + lines[-1]


def test_nothing_is_drawn_of_nothing_or_into_nothing() -> None:
    for points, width, height in (([], 40, 5), ([(0, 1.0)], 40, 5), ([(0, 1.0), (1, 2.0)], LABEL_WIDTH, 5)):
        assert plot(points, width, height) == []
    assert plot([(0, 1.0), (1, 2.0)], 40, 0) == []
