"""Who gives way in a full table of authors."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.protocol.author_places import AuthorPlaces, Introducer

ALICE, BOB, CAROL = (Introducer(name * 32, f"10.0.{number}.0/24") for number, name in enumerate((b"a", b"b", b"c")))


def take(places: AuthorPlaces, names: list[str], introducer: Introducer | None) -> list[str]:
    """Have them enter one by one; those that did, in the end, not find room."""
    for name in names:
        author = name.encode()
        if places.is_full:
            rival = places.rival(author, introducer)
            if rival is None:
                continue
            places.remove(rival)
        places.add(author, introducer)
    return [name for name in names if name.encode() not in places]


def named(prefix: str, number: int) -> list[str]:
    return [f"{prefix}{index}" for index in range(number)]


def test_the_newest_of_who_has_most_give_way() -> None:
    places = AuthorPlaces(10)
    assert take(places, named("a", 8), ALICE) == []
    assert take(places, named("b", 8), BOB) == named("b", 8)[5:], "each has a half"
    assert [name for name in named("a", 8) if name.encode() not in places] == ["a5", "a6", "a7"]
    assert take(places, named("c", 8), CAROL) == named("c", 8)[3:]
    assert len(places) == 10


def test_one_network_is_one_introducer_however_many_peers_it_has() -> None:
    places = AuthorPlaces(12)
    take(places, named("a", 4), ALICE)
    for number in range(20):
        take(places, named(f"{number} ", 2), Introducer(bytes([number]) * 32, CAROL.network))
    assert take(places, named("a", 4), None) == []
    assert take(places, named("b", 3), BOB) == [], "others still find room"
    assert all(name.encode() in places for name in named("a", 4))


def test_whom_many_speak_of_counts_for_who_has_fewest() -> None:
    """One peer tells a newcomer of the whole run: its authors do not give way to those that only one speaks of."""
    places = AuthorPlaces(200)
    run = named("member", 60)
    take(places, run, ALICE)
    honest = [Introducer(bytes([number]) * 32, f"10.1.{number}.0/24") for number in range(6)]
    for name in run:
        for introducer in honest:
            places.vouch(name.encode(), introducer)
    for number in range(8):
        take(places, named(f"liar {number} ", 100), Introducer(bytes([200 + number]) * 32, f"10.2.{number}.0/24"))
    assert all(name.encode() in places for name in run)
    assert take(places, named("newcomer", 4), honest[0]) == []


def test_of_one_peers_authors_those_stay_that_others_speak_of() -> None:
    places = AuthorPlaces(6)
    take(places, ["invented", "member"], ALICE)
    take(places, named("b", 1), BOB)
    places.vouch(b"member", Introducer(b"z" * 32, "10.9.9.0/24"))
    take(places, named("a", 3), ALICE)
    for number in range(4):
        take(places, [f"c{number}"], Introducer(bytes([number]) * 32, f"10.3.{number}.0/24"))
    assert b"member" in places
    assert b"a2" not in places


def test_the_needed_stay_and_always_get_in() -> None:
    places = AuthorPlaces(4)
    places.protect(lambda author: author.startswith(b"friend"))
    take(places, ["friend 0", "a1", "a2", "a3"], ALICE)
    assert take(places, ["friend 1", "friend 2"], ALICE) == []
    assert b"friend 0" in places
    assert take(places, ["friend 3"], ALICE) == []
    assert take(places, ["b1"], BOB) == ["b1"], "none but the needed are left"
    assert take(places, ["friend 4"], BOB) == ["friend 4"]


def test_what_came_from_disk_gives_way_last() -> None:
    places = AuthorPlaces(4)
    take(places, named("stored", 4), None)
    assert take(places, named("a", 3), ALICE) == ["a1", "a2"]
    assert take(places, named("b", 3), BOB) == ["b0", "b1", "b2"]
    places.vouch(b"stored0", BOB)
    places.vouch(b"stored1", BOB)
    assert take(places, ["c"], CAROL) == []
    assert b"stored1" not in places, "spoken of, it counts as any other"


peers = st.integers(0, 8).map(lambda number: Introducer(bytes([number]) * 32, f"10.0.{number // 3}.0/24"))


@given(st.lists(st.tuples(st.integers(0, 60), st.one_of(st.none(), peers)), max_size=300), st.randoms())
@settings(max_examples=100, deadline=None)
def test_no_network_ever_gains_by_having_more(heard: list[tuple[int, Introducer | None]], rng: random.Random) -> None:
    """Whatever is heard from whom: the bound holds, and a newcomer costs a place only where more are than its own."""
    places = AuthorPlaces(12)
    for number, introducer in heard:
        author = bytes([number])
        if author in places:
            places.vouch(author, introducer)
            continue
        if places.is_full:
            rival = places.rival(author, introducer)
            if rival is None:
                continue
            if introducer is not None and (loser := places.introducer_of(rival)) is not None:
                held = places.by_network()
                assert held[loser.network] > held.get(introducer.network, 0) or loser.network == introducer.network
            places.remove(rival)
        places.add(author, introducer)
        if rng.random() < 0.1:
            places.remove(author)
        assert len(places) <= 12
    assert sum(places.by_network().values()) <= len(places)
