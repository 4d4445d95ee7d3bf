from __future__ import annotations

import pytest

from farandole.node.base.figures import parse_rate, parse_size


def test_rates_and_sizes_are_as_people_write_them() -> None:
    rates = {"20": 2.5e6, "20 Mbit/s": 2.5e6, "500kbit": 62_500, "1Gbit": 1.25e8, "0.5Mbps": 62_500}
    assert {text: parse_rate(text) for text in rates} == rates
    sizes = {"24GB": 24e9, "24": 24e9, "24 GiB": 24 * 2**30, "800MB": 8e8, "1.5TB": 1.5e12}
    assert {text: parse_size(text) for text in sizes} == sizes


@pytest.mark.parametrize("text", ["", "0", "-1", "fast", "20 MB/s", "nan", "1e3"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no rate"):
        parse_rate(text)
