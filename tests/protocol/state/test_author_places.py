"""Which authors give way in a full table."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.protocol.state.author_places import AuthorPlaces, Introducer

ALICE, BOB, CAROL = (Introducer(name * 32, f"10.0.{number}.0/24") for number, name in enumerate((b"a", b"b", b"c")))


def take(places: AuthorPlaces, names: list[str], introducer: Introducer | None) -> list[str]:
    """Add authors one by one; return the ones that found no place, or have lost it."""
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


def with_settled(capacity: int) -> AuthorPlaces:
    """Return a table that is half full, with authors that came first."""
    places = AuthorPlaces(capacity)
    take(places, named("settled", capacity // 2), ALICE)
    return places


def test_of_the_others_the_newest_of_who_has_most_give_way() -> None:
    places = with_settled(20)
    assert take(places, named("a", 8), ALICE) == []
    assert take(places, named("b", 8), BOB) == named("b", 8)[5:], "each has a half"
    assert [name for name in named("a", 8) if name.encode() not in places] == ["a5", "a6", "a7"]
    assert take(places, named("c", 8), CAROL) == named("c", 8)[3:]
    assert len(places) == 20


def test_one_network_is_one_introducer_however_many_peers_it_has() -> None:
    places = with_settled(24)
    take(places, named("a", 4), ALICE)
    for number in range(20):
        take(places, named(f"{number} ", 2), Introducer(bytes([number]) * 32, CAROL.network))
    assert take(places, named("a", 4), None) == []
    assert take(places, named("b", 3), BOB) == [], "others still find room"
    assert all(name.encode() in places for name in named("a", 4))


def test_the_needed_stay_and_always_get_in() -> None:
    places = with_settled(8)
    places.protect(lambda author: author.startswith(b"friend"))
    take(places, ["friend 0", "a1", "a2", "a3"], ALICE)
    assert take(places, ["friend 1", "friend 2"], ALICE) == []
    assert b"friend 0" in places
    assert take(places, ["friend 3"], ALICE) == []
    assert take(places, ["b1"], BOB) == ["b1"], "none but the needed are left"
    assert take(places, ["friend 4"], BOB) == ["friend 4"]


def test_when_who_came_first_goes_the_introducer_with_fewest_has_an_heir() -> None:
    places = with_settled(8)
    take(places, named("a", 3), ALICE)
    take(places, named("b", 1), BOB)
    places.remove(b"settled0")
    assert take(places, ["c"], CAROL) == []
    for number in range(20):
        take(places, ["rest"], Introducer(bytes([number]) * 32, str(number)))
    assert b"b0" in places


peers = st.integers(0, 8).map(lambda number: Introducer(bytes([number]) * 32, f"10.0.{number // 3}.0/24"))


@given(st.lists(st.tuples(st.integers(0, 60), st.one_of(st.none(), peers), st.booleans()), max_size=300))
@settings(max_examples=100, deadline=None)
def test_the_bound_holds_and_the_first_stay(heard: list[tuple[int, Introducer | None, bool]]) -> None:
    """The bound holds for any sources and any authors that leave."""
    places = AuthorPlaces(12)
    first: list[bytes] = []
    for number, introducer, leaves in heard:
        author = bytes([number])
        if author in places:
            if leaves and author not in first:
                places.remove(author)
            continue
        take(places, [chr(number)], introducer)
        if len(first) < 6:
            first.append(author)
        assert len(places) <= 12
        assert all(name in places for name in first)
