"""Entries of the next release: read as far as they are known, passed on as they were signed, and no peer's fault."""

from __future__ import annotations

import random
import sys
import threading
from typing import Any

import msgspec
import pytest

from farandole.protocol.state.entries import (
    ALL_RULES,
    LATER_KINDS,
    MAX_BODY_BYTES,
    RULES,
    Checker,
    Delta,
    Entry,
    Kind,
    LeasedSlices,
    Member,
    ProgramNotes,
    Signed,
    decode_delta,
)
from farandole.protocol.state.gossip import FAULT_BURST, Gossip
from farandole.protocol.state.state import AUTHOR_BURST, Outcome, RunState
from farandole.protocol.state.writer import Writer
from farandole.protocol.wire.errors import RemoteProtocolError

from ...next_release.sitecustomize import entries_of_next_release
from ..authors import (
    CREATOR,
    NOW,
    RUN_ID,
    author_of,
    beat,
    contents,
    key_of,
    member,
    progress,
    sign_body,
    state_of,
    tick_at,
)
from .test_antientropy import Transcript
from .test_entries import LARGEST

CHECKER = Checker(RUN_ID, CREATOR)
NEXT = entries_of_next_release()
NEXT_CHECKER: Any = NEXT.Checker(RUN_ID, CREATOR)
PLAN = 19
SHORT, LONG = range(19, 26), (26, 27)
JUNK = [b"j" * 20, {"a": [1, None, {}]}, -1, 2**63, msgspec.msgpack.Ext(7, b"x")]


def raw(number: int, kind: int, index: int, fields: object, at: float = NOW) -> Signed:
    """Sign an entry with any fields."""
    return sign_body(number, msgspec.msgpack.encode([kind, index, int(at // ALL_RULES[kind].quantum), fields]))


def plan(number: int, fields: object = ("on",), at: float = NOW) -> Signed:
    return raw(number, PLAN, 0, fields, at)


def known_fields(kind: Kind) -> list[Any]:
    """Return a small payload of a kind, as a list."""
    payloads = {
        Kind.MEMBER: Member(version="1"),
        Kind.LEASE: msgspec.structs.replace(LARGEST[Kind.LEASE], done=b"d"),
        Kind.SUSPECTS: msgspec.structs.replace(LARGEST[Kind.SUSPECTS], peers=(b"x",)),
        Kind.NOTICE: msgspec.structs.replace(LARGEST[Kind.NOTICE], text="t"),
        Kind.ADMISSION: msgspec.structs.replace(LARGEST[Kind.ADMISSION], admission=b"a"),
        Kind.REVOCATION: msgspec.structs.replace(LARGEST[Kind.REVOCATION], keys=(b"k" * 32,)),
        Kind.COMMITMENT: msgspec.structs.replace(LARGEST[Kind.COMMITMENT], build="b", device="d"),
        Kind.ACCUSATION: msgspec.structs.replace(LARGEST[Kind.ACCUSATION], body=b"b"),
        Kind.NOTES: ProgramNotes((("chat", b"v"),)),
    }
    return list(msgspec.structs.astuple(payloads.get(kind, LARGEST[kind])))


def author_for(kind: Kind) -> int:
    return 255 if kind in (Kind.NOTICE, Kind.REVOCATION) else 1


def entry(signed: Signed) -> Entry:
    return CHECKER.check(signed)


@pytest.mark.parametrize("kind", Kind)
def test_an_appended_field_hides_none_of_the_known_ones(kind: Kind) -> None:
    fields = known_fields(kind)
    more: list[list[Any]] = [["j"], [None, -1], [{"a": []}]]
    for junk in more:
        later = raw(author_for(kind), kind, 0, [*fields, *junk])
        assert entry(later).payload == entry(raw(author_for(kind), kind, 0, fields)).payload
        assert entry(later).signed is later


@pytest.mark.parametrize("kind", [kind for kind in Kind if RULES[kind].checked])
def test_appended_fields_do_not_raise_a_kinds_bound_and_excuse_no_known_one(kind: Kind) -> None:
    fields = known_fields(kind)
    with pytest.raises(RemoteProtocolError, match="bytes"):
        entry(raw(author_for(kind), kind, 0, [*fields, b"j" * RULES[kind].max_bytes]))
    with pytest.raises(RemoteProtocolError):
        entry(raw(author_for(kind), kind, 0, [{}, *fields[1:], "later"]))
    with pytest.raises(RemoteProtocolError):
        entry(raw(author_for(kind), kind, 0, dict(enumerate(fields))))


def test_a_body_and_a_lease_have_no_later_fields() -> None:
    """Around the payload junk would escape its bound; within a field no newer node could skip it."""
    with pytest.raises(RemoteProtocolError):
        entry(sign_body(1, msgspec.msgpack.encode([1, 0, 1, list(msgspec.structs.astuple(Member())), "later"])))
    with pytest.raises(RemoteProtocolError):
        entry(raw(1, Kind.LEASE, 0, [0, b"c" * 8, [[*msgspec.structs.astuple(LeasedSlices(0, 1)), "later"]]]))


def test_the_limits_that_releases_agree_on_are_these() -> None:
    """A change of these splits a run of two releases: use an appended field, or a kind of `LATER_KINDS`."""
    limits = {
        int(kind): (rule.slots, rule.quantum, rule.ttl, rule.max_bytes, rule.checked)
        for kind, rule in ALL_RULES.items()
    }
    short, long = (1, 5, 3_600, 512, 0), (4, 60, 604_800, 512, 0)
    assert limits == {
        1: (1, 5, 3_600, 512, 9),
        2: (1, 1, 120, 64, 5),
        3: (1, 60, 604_800, 64, 5),
        4: (8, 2, 3_600, 256, 4),
        5: (4, 10, 86_400, 256, 6),
        6: (1, 5, 3_600, 512, 1),
        9: (4, 10, 604_800, 512, 2),
        10: (1, 1, 180, 16, 3),
        11: (1, 10, 1_814_400, 592, 1),
        12: (8, 10, 315_360_000, 512, 2),
        16: (4, 1, 3_600, 272, 12),
        17: (4, 60, 86_400, 448, 3),
        **dict.fromkeys((18, 25), short),  # later than a release once
        26: long,
        **dict.fromkeys(SHORT, short),
        **dict.fromkeys(LONG, long),
    }
    assert all(len(rule.payload.__struct_fields__) >= rule.checked for rule in RULES.values())


@pytest.mark.parametrize("fields", [["on"], {"any": "form"}, 5, [[["a name", b""]]], [[["chat", b"v" * 449]]]])
def test_a_kind_that_a_release_does_not_know_is_valid_whatever_it_says_in_later_ones_too(fields: object) -> None:
    found = entry(raw(1, Kind.NOTES, 0, fields))
    assert (found.kind, found.payload) == (Kind.NOTES, None)


@pytest.mark.parametrize("kind", LATER_KINDS)
def test_an_unknown_kind_is_kept_unread_whatever_it_says(kind: int) -> None:
    for fields in (["on"], {"any": "form"}, 5, "text", None, JUNK, b"b" * 500):
        found = entry(raw(1, kind, 0, fields))
        assert (found.kind, found.payload) == (kind, None)
    rule = LATER_KINDS[kind]
    for wrong in (raw(1, kind, rule.slots, []), raw(1, kind, 0, b"b" * (rule.max_bytes + 1))):
        with pytest.raises(RemoteProtocolError):
            entry(wrong)
    forged = raw(1, kind, 0, ["on"])
    with pytest.raises(RemoteProtocolError, match="signature"):
        entry(Signed(author_of(2), forged.body, forged.signature))


def test_an_unknown_kind_expires_is_replaced_and_forks_as_any_other() -> None:
    state = state_of(plan(1))
    assert state.merge(Delta((plan(1), plan(1, at=NOW - 10))), NOW).outcomes == [Outcome.KNOWN, Outcome.OLD]
    assert state.merge(Delta((plan(1, ["off"], at=NOW + 5),)), NOW).outcomes == [Outcome.NEW]
    assert [(found.kind, found.tick) for found in state] == [(PLAN, int((NOW + 5) // 5))]
    assert state.expire(NOW + 3_700)
    assert len(state) == 0
    forked = state_of(plan(1), plan(1, ["two"]), member(1))
    assert forked.proof_of(author_of(1)) is not None
    assert len(forked) == 0


def test_two_releases_agree_on_the_state_and_bring_it_to_each_other_and_to_disk_as_it_was_signed() -> None:
    items = (plan(1), raw(1, Kind.MEMBER, 0, [*msgspec.structs.astuple(Member()), "fine"]), beat(1), raw(2, 27, 3, 1))
    mine, theirs = state_of(*items), state_of(progress(3, 5))
    Transcript(mine, theirs)
    assert contents(theirs) - contents(state_of(beat(1))) == contents(mine) - contents(state_of(beat(1)))
    assert mine.root == theirs.root
    assert {found.signed for found in theirs if found.kind != Kind.PROGRESS} >= {items[0], items[1], items[3]}
    for signed in items:  # and the next release reads all of it
        assert NEXT_CHECKER.check(signed).signed == signed
    assert NEXT_CHECKER.check(items[0]).payload.words == "on"
    assert NEXT_CHECKER.check(items[1]).payload.mood == "fine"
    later = raw(1, Kind.MEMBER, 0, [*msgspec.structs.astuple(Member()), "fine"])
    row = state_of(plan(1), later).export(author_of(1))
    assert row is not None
    assert set(decode_delta(row).entries) == {plan(1), later}


def test_a_node_that_is_set_back_goes_on_after_its_next_releases_entries() -> None:
    """Otherwise the older release might sign a tick of that kind again, once it knows the kind."""
    writer = Writer(key_of(1), RUN_ID)
    writer.observe(entry(plan(1)))
    mark = writer.mark_needed(Kind.MEMBER, 0, NOW)
    assert mark is not None
    writer.marked(mark)
    writer.write(Kind.MEMBER, 0, Member(), NOW)


@pytest.mark.parametrize(
    "lie",
    [
        plan(7, []),
        plan(7, {"no": "plan"}),
        plan(7, ["w" * 65]),
        raw(7, Kind.MEMBER, 0, [*msgspec.structs.astuple(Member(device="x")), 5]),
        raw(7, Kind.MEMBER, 0, [*msgspec.structs.astuple(Member(device="x")), "longer than eight"]),
        raw(7, Kind.MEMBER, 0, [*msgspec.structs.astuple(Member(device="x"))[:9], "\x1b[2J"]),  # the version
    ],
)
def test_a_lie_in_what_old_nodes_do_not_know_turns_no_new_node_against_them(lie: Signed) -> None:
    """The attack: an author writes what only a newer release would refuse, old nodes pass it on, and new ones shut the
    old ones out, which splits the run. So both releases find it valid, and the new one reads what it can."""
    old, new = CHECKER.check(lie), NEXT_CHECKER.check(lie)
    assert (old.id, old.slot, old.expires_at) == (new.id, new.slot, new.expires_at)
    if lie.body[1] == PLAN:
        assert (old.payload, new.payload) == (None, None)
    else:
        assert (new.payload.device, new.payload.mood) == ("x", "")
        assert old.payload.device == "x"
        assert old.payload.version == new.payload.version == ""


def test_junk_of_unknown_kinds_fills_no_more_than_its_authors_slots_and_meters() -> None:
    """The attack: an author floods the state with kinds that no node reads."""
    state = RunState(RUN_ID, CREATOR)
    for step in range(200):
        at = NOW + step * 5
        state.merge(Delta(tuple(raw(1, kind, 0, b"j" * 500, at) for kind in SHORT)), at)
        state.merge(Delta(tuple(raw(1, kind, index, b"j" * 500, at) for kind in LONG for index in range(4))), at)
    held = state.entries_of(author_of(1))
    assert len(held) == sum(rule.slots for rule in LATER_KINDS.values()) == 15
    row = state.export(author_of(1))
    assert row is not None
    assert len(row) < 15 * (MAX_BODY_BYTES + 128) < 12_000
    at_once = [raw(2, kind, 0, "j", NOW - 3_000 + 5 * step) for step in range(100) for kind in SHORT]
    outcomes = [state.merge(Delta((item,)), NOW).outcomes[0] for item in at_once]
    assert outcomes.count(Outcome.NEW) == AUTHOR_BURST
    assert outcomes.count(Outcome.DEFERRED) == len(at_once) - AUTHOR_BURST


def test_a_peer_that_brings_a_next_releases_entries_is_not_at_fault_and_one_that_brings_none_of_them_is() -> None:
    gossip = Gossip(RunState(RUN_ID, CREATOR), author_of(9), random.Random(0))
    for number in range(4 * FAULT_BURST):
        gossip.merge(Delta((plan(1 + number), raw(1 + number, 27, 0, JUNK))), author_of(8), NOW, 0.0)
    assert len(gossip.state) == 8 * FAULT_BURST
    no_kind = [sign_body(1, msgspec.msgpack.encode([kind, 0, 1, []])) for kind in (0, 7, 8, 13, 28, 255)]
    with pytest.raises(RemoteProtocolError, match="too many invalid"):
        gossip.merge(Delta((*no_kind, *no_kind)), author_of(8), NOW, 0.0)


def test_the_deepest_junk_that_fits_is_the_same_to_all_nodes() -> None:
    """Nested arrays take a byte each, and Python's limit on recursion differs with the caller's depth: 1,000 less."""
    deep = b"\x91" * 490 + b"\xc0"
    items = [
        sign_body(
            1, msgspec.msgpack.encode([Kind.SUSPECTS, 0, tick_at(Kind.SUSPECTS), msgspec.Raw(b"\x92\x90" + deep)])
        ),
        sign_body(1, msgspec.msgpack.encode([PLAN, 0, int(NOW // 5), msgspec.Raw(deep)])),
    ]

    def check() -> None:
        found.extend(CHECKER.check(item) for item in items)

    found: list[Entry] = []
    thread = threading.Thread(target=check)
    thread.start()
    thread.join()
    check()
    assert len(found) == 4
    assert sys.getrecursionlimit() >= 1_000
