from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farandole.node.base.config.toml_file import read_toml
from farandole.node.base.figures import parse_rate, parse_size
from farandole.node.base.quiet_hours import QuietHoursError, parse_quiet_hours, quiet_until
from farandole.node.base.requirements import check_times, doubtful_settings
from farandole.node.base.settings import ANNOUNCED_FORM, MAX_ANNOUNCED, check_announced
from farandole.node.store.run_file import manifest_of
from farandole.protocol.state.entries import MAX_MEMBER_ADDRESS_CHARS, Member
from farandole.protocol.wire.errors import FarandoleError, ManifestError

decode_member = msgspec.msgpack.Decoder(Member).decode


def test_public_addresses_and_names_are_announced_each_once() -> None:
    addresses = ["/ip4/8.8.8.8/tcp/4001", "/ip6/2606:4700::1111/tcp/1", "/dns/a-1.example.org/tcp/65535"]
    assert check_announced([*addresses, addresses[0]]) == addresses
    assert check_announced(["/dns4/localhost/tcp/4001", "/dns6/x/tcp/4001"])
    assert check_announced([]) == []


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/192.168.1.10/tcp/4001",
        "/ip6/fe80::1/tcp/4001",
        "/ip6/8.8.8.8/tcp/4001",
        "/ip4/2606:4700::1111/tcp/4001",
        "/ip4/8.8.8.8/tcp/0",
        "/ip4/8.8.8.8/tcp/65536",
        "/ip4/8.8.8.8/tcp/\u0664",
        "/ip4/8.8.8.8/udp/4001/quic-v1",
        "/ip4/8.8.8.8/tcp/4001/p2p/12D3KooWPexrH79BHenTqWcGfyd8U9ZzX9LYthJM72n2PH1jRzfK",
        "/dns/-bad/tcp/4001",
        "/dns/a..b/tcp/4001",
        f"/dns/{'a.' * 130}a/tcp/4001",
        f"/dns/{'a.' * 90}a/tcp/4001",
        "/dns/8.8.8.8/tcp/4001",
        "/dns/0x7f000001/tcp/4001",
        "8.8.8.8:4001",
        "",
    ],
)
def test_other_addresses_are_refused_with_the_form_that_they_need(address: str) -> None:
    with pytest.raises(FarandoleError, match="/ip4/PUBLIC-IP/tcp/PORT"):
        check_announced(["/ip4/8.8.8.8/tcp/4001", address])


def test_every_address_that_can_be_announced_fits_into_a_member_entry() -> None:
    labels = ".".join(["a" * 59] * 3)
    longest = f"/dns4/{labels[: MAX_MEMBER_ADDRESS_CHARS - len('/dns4//tcp/65535')]}/tcp/65535"
    assert len(longest) == MAX_MEMBER_ADDRESS_CHARS
    assert f"at most {MAX_MEMBER_ADDRESS_CHARS} characters" in ANNOUNCED_FORM
    assert check_announced([longest]) == [longest]
    assert decode_member(msgspec.msgpack.encode(Member(addresses=(longest,)))).addresses == (longest,)


def test_no_more_are_announced_than_an_invite_holds() -> None:
    addresses = [f"/ip4/8.8.8.{i}/tcp/4001" for i in range(MAX_ANNOUNCED + 1)]
    assert check_announced(addresses[1:]) == addresses[1:]
    with pytest.raises(FarandoleError):
        check_announced(addresses)


ROOT = Path(__file__).parents[3]


def warnings(**settings: Any) -> list[str]:
    complete = {"name": "a", "model": "tiny", **settings}
    return [*doubtful_settings(manifest_of(complete, Path(), 0))]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"inner": {"total_steps": 1_000}}, "inner.warmup_steps (1000) is not less than inner.total_steps (1000)"),
        ({"inner": {"warmup_steps": 2}, "model": {"preset": "tiny", "num_stages": 2}}, "the model is in stages"),
    ],
)
def test_what_does_not_work_is_warned_of(settings: dict[str, Any], words: str) -> None:
    (warning,) = warnings(**settings)
    assert words in warning


def test_exchanges_that_may_take_longer_than_rounds_are_refused() -> None:
    run = manifest_of({"name": "a", "model": "tiny", "rounds": {"round_seconds": 1}}, Path(), 0)
    with pytest.raises(ManifestError, match=r"\(30\) is longer than rounds.round_seconds \(1\).*Set a longer"):
        check_times(run)


def test_what_works_and_the_example_are_not() -> None:
    assert warnings(rounds={"round_seconds": 0, "inner_steps": 10}) == warnings(inner={"total_steps": 1_001}) == []
    settings = read_toml(ROOT / "examples" / "run.toml").values
    assert [*doubtful_settings(manifest_of(settings, ROOT, 0))] == []


MONDAY = datetime(2026, 11, 23)


def until(texts: list[str], day: int, hour: int, minute: int = 0) -> str | None:
    """Return the end of the quiet hours, in a week that begins with Monday, day 0."""
    now = MONDAY.replace(day=23 + day, hour=hour, minute=minute)
    end = quiet_until([parse_quiet_hours(text) for text in texts], now)
    return None if end is None else end.strftime("%a %H:%M")


@pytest.mark.parametrize(
    ("hours", "day", "hour", "minute", "end"),
    [
        ("09:00-17:30", 0, 8, 59, None),
        ("09:00-17:30", 0, 9, 0, "Mon 17:30"),
        ("09:00-17:30", 0, 17, 30, None),
        ("22:00-07:00", 0, 23, 0, "Tue 07:00"),
        ("22:00-07:00", 0, 6, 59, "Mon 07:00"),
        ("22:00-07:00", 0, 7, 0, None),
        ("Fri 20:00-04:00", 5, 3, 0, "Sat 04:00"),
        ("Fri 20:00-04:00", 4, 3, 0, None),
        ("sat-sun 10:00-24:00", 5, 12, 0, "Sun 00:00"),
        ("Sun-Mon 10:00-11:00", 0, 10, 30, "Mon 11:00"),
        ("Sun-Mon 10:00-11:00", 2, 10, 30, None),
    ],
)
def test_hours_hold_on_their_days_and_past_midnight(hours: str, day: int, hour: int, minute: int, end: str) -> None:
    assert until([hours], day, hour, minute) == end


def test_hours_that_follow_each_other_are_one_rest() -> None:
    assert until(["20:00-23:00", "22:00-02:00", "Tue 02:00-05:00"], 0, 21) == "Tue 05:00"
    assert until([], 0, 21) is None


def test_who_is_always_quiet_gets_an_answer_too() -> None:
    assert until(["00:00-24:00"], 0, 12) is not None


@pytest.mark.parametrize("text", ["", "22-7", "25:00-03:00", "24:30-03:00", "10:60-11:00", "Foo 10:00-11:00", "10:00"])
def test_what_is_no_hours_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(QuietHoursError, match="no quiet hours"):
        parse_quiet_hours(text)


def test_rates_and_sizes_are_as_people_write_them() -> None:
    rates = {"20": 2.5e6, "20 Mbit/s": 2.5e6, "500kbit": 62_500, "1Gbit": 1.25e8, "0.5Mbps": 62_500}
    assert {text: parse_rate(text) for text in rates} == rates
    sizes = {"24GB": 24e9, "24": 24e9, "24 GiB": 24 * 2**30, "800MB": 8e8, "1.5TB": 1.5e12}
    assert {text: parse_size(text) for text in sizes} == sizes


@pytest.mark.parametrize("text", ["", "0", "-1", "fast", "20 MB/s", "nan", "1e3"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no rate"):
        parse_rate(text)
