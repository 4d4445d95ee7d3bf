from __future__ import annotations

import pytest

from farandole.node.base.figures import parse_rate, parse_size


@pytest.mark.parametrize(
    ("text", "rate"),
    [("20", 2.5e6), ("20 Mbit/s", 2.5e6), ("500kbit", 62_500), ("1Gbit", 1.25e8), ("0.5Mbps", 62_500)],
)
def test_rates_as_people_write_them(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "size"), [("24GB", 24e9), ("24", 24e9), ("24 GiB", 24 * 2**30), ("800MB", 8e8), ("1.5TB", 1.5e12)]
)
def test_sizes_as_people_write_them(text: str, size: float) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "fast", "20 MB/s", "nan", "1e3"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no rate"):
        parse_rate(text)
