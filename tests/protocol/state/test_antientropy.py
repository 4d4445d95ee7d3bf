from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.protocol.state.antientropy import (
    MAX_BUCKETS_OF_FULL,
    MAX_FRAME_BYTES,
    MAX_NEW_TO_FULL,
    MAX_SENT_BYTES,
    Done,
    Session,
    SyncHello,
    Wants,
    decode_frame,
    encode_frame,
)
from farandole.protocol.state.author_places import Introducer
from farandole.protocol.state.entries import Checker, Delta, Entry, Kind, Signed
from farandole.protocol.state.state import NUM_BUCKETS, RunState
from farandole.protocol.wire.errors import LocalProtocolError, RemoteProtocolError
from farandole.protocol.wire.messagepack import encode

from ..authors import CREATOR, NOW, RUN_ID, author_of, beat, contents, member, notice, state_of, tick_at


class Transcript:
    """A complete session between two states, and the bytes that each side sent."""

    def __init__(
        self, alice: RunState, bob: RunState, *, with_beats: bool = False, piece: int = 1 << 20, seed: int = 1
    ) -> None:
        rng = random.Random(seed)
        self.initiator = Session(alice, rng, NOW, is_initiator=True, with_beats=with_beats)
        self.responder = Session(bob, rng, NOW, is_initiator=False)
        self.sent = {True: b"", False: b""}
        self.initiator_got: list[Signed] = []
        to_bob = True
        data = self.initiator.start()
        while data:
            self.sent[to_bob] += data
            receiver, state = (self.responder, bob) if to_bob else (self.initiator, alice)
            answer = b""
            for start in range(0, len(data), piece):
                deltas, to_send = receiver.receive_data(data[start : start + piece])
                answer += to_send
                for delta in deltas:
                    self.initiator_got += [] if to_bob else delta.entries
                    state.merge(delta, NOW, Introducer(b"other"))
            data, to_bob = answer, not to_bob
        assert self.initiator.is_done
        assert self.responder.is_done


entries = st.one_of(
    st.builds(lambda n, ago: member(n, tick_at(Kind.MEMBER) - ago, f"at {ago}"), st.integers(1, 9), st.integers(0, 3)),
    st.builds(lambda n, index: notice(n, index), st.integers(1, 9), st.integers(0, 7)),
    st.builds(lambda n, story: member(n, device=story), st.integers(10, 11), st.sampled_from("ab")),
)


@given(st.lists(entries, max_size=20), st.lists(entries, max_size=20), st.sampled_from([1, 7, 1 << 20]), st.booleans())
@settings(max_examples=80)
def test_after_a_session_both_have_all(one: list[Signed], two: list[Signed], piece: int, with_beats: bool) -> None:
    alice, bob = state_of(*one), state_of(*two)
    Transcript(alice, bob, with_beats=with_beats, piece=piece)
    both = state_of(*one, *two)
    Transcript(alice, bob, piece=piece)  # a fork seen by only one of them becomes a proof, which is then sent
    assert alice.root == bob.root
    if not any(both.proof_of(author) for author in both.authors):
        assert contents(alice) == contents(bob) == contents(both)


def test_equal_states_exchange_two_hellos_and_others_what_differs() -> None:
    alice, bob = state_of(member(1), notice(2)), state_of(notice(2), member(1), beat(1))
    transcript = Transcript(alice, bob)
    assert len(transcript.sent[True]) + len(transcript.sent[False]) < 2 * (32 + 32 + 20)
    assert transcript.initiator.peer_now == int(NOW)
    common = [member(number) for number in range(1, 200)]
    alice, bob = state_of(*common, notice(1)), state_of(*common, notice(2))
    transcript = Transcript(alice, bob)
    assert alice.root == bob.root
    num_bytes = sum(map(len, transcript.sent.values()))
    assert num_bytes < 4_096 + 1_500, "the buckets' digests, the references of two buckets, two entries"


def test_heartbeats_are_exchanged_on_request_alone() -> None:
    alice, bob = state_of(member(1), beat(1), beat(3)), state_of(member(1), beat(2), beat(3))
    Transcript(alice, bob)
    assert alice.get(author_of(2), Kind.BEAT) is None
    transcript = Transcript(alice, bob, with_beats=True)
    assert {entry.author for entry in alice.entries(Kind.BEAT)} == {author_of(1), author_of(2), author_of(3)}
    assert {entry.author for entry in bob.entries(Kind.BEAT)} == {author_of(1), author_of(2), author_of(3)}
    assert transcript.sent[True].count(author_of(3)) == 0, "bob has just said that he has it"


def test_a_large_difference_takes_several_sessions() -> None:
    class Gullible(Checker):
        """Verifies nothing, so that a large state is built quickly."""

        def is_genuine(self, entry: Entry) -> bool:
            return True

    def make(numbers: range) -> RunState:
        state = RunState(RUN_ID, CREATOR, checker=Gullible(RUN_ID, CREATOR))
        template = [notice(1, index) for index in range(8)] + [member(1)]
        for number in numbers:
            author = number.to_bytes(32, "big")
            state.merge(Delta(tuple(Signed(author, item.body, item.signature) for item in template)), NOW)
        return state

    alice, bob = make(range(4_000)), make(range(0))
    num_sessions = 0
    while alice.root != bob.root:
        transcript = Transcript(alice, bob)
        assert all(len(sent) <= MAX_SENT_BYTES for sent in transcript.sent.values())
        num_sessions += 1
    assert 2 <= num_sessions <= 16


def test_peers_of_another_run_or_version_and_streams_that_end_early_are_refused() -> None:
    state = state_of(member(1))
    for hello in (SyncHello(2, RUN_ID, 0, bytes(32)), SyncHello(1, b"o" * 32, 0, bytes(32))):
        session = Session(state, random.Random(0), NOW, is_initiator=False)
        with pytest.raises(RemoteProtocolError):
            session.receive_data(encode_frame(hello))
    session = Session(state_of(member(1)), random.Random(0), NOW, is_initiator=True)
    session.start()
    assert not session.is_done
    with pytest.raises(LocalProtocolError):
        session.start()


def test_frames_out_of_turn_or_too_long_are_refused() -> None:
    hello = encode_frame(SyncHello(1, RUN_ID, 0, bytes(32)))
    for data in (
        encode_frame(Done()),
        encode_frame(Wants((), True)),
        hello + hello,
        (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        b"\xff" * 64,
        b"\0\0\0\1\xc1",
    ):
        session = Session(state_of(member(1)), random.Random(0), NOW, is_initiator=False)
        with pytest.raises(RemoteProtocolError):
            session.receive_data(data)
    session = Session(state_of(), random.Random(0), NOW, is_initiator=False)
    with pytest.raises(RemoteProtocolError):
        session.receive_data(encode_frame(SyncHello(1, RUN_ID, 0, state_of().root)) + b"more")


def test_a_peer_that_never_stops_is_stopped() -> None:
    alice, bob = state_of(member(1)), state_of(member(2))
    session = Session(alice, random.Random(0), NOW, is_initiator=True)
    session.start()
    answer = Session(bob, random.Random(0), NOW, is_initiator=False)
    session.receive_data(answer.receive_data(encode_frame(SyncHello(1, RUN_ID, 0, alice.root)))[1])
    junk = encode_frame(decode_frame(msgspec.msgpack.encode([4, [[member(1)] * 256, []]])))

    def flood() -> None:
        for _ in range(1_000):
            session.receive_data(junk)

    with pytest.raises(RemoteProtocolError, match="more bytes"):
        flood()


def full_state(first: int, number: int, *common: Signed) -> RunState:
    """Return a full table with the ``common`` entries and ``number`` authors of its own."""
    state = RunState(RUN_ID, CREATOR, max_authors=len(common) + number)
    state.merge(Delta((*common, *(member(index) for index in range(first, first + number)))), NOW)
    assert not state.num_free
    return state


def test_full_tables_that_differ_cost_each_session_little_and_still_bring_what_is_new() -> None:
    """They never become equal, but news about an author that both have still gets across."""
    common = [member(number) for number in range(1, 40)]
    alice, bob = full_state(1_000, 160, *common), full_state(2_000, 160, *common)
    news = [notice(number) for number in range(1, 40)]
    bob.merge(Delta(tuple(news)), NOW)
    bytes_of_all = len(encode(Delta(tuple(entry.signed for entry in bob))))
    most, num_sessions = 0, 0
    while not all(alice.get(item.author, Kind.CHECKPOINT) for item in news):
        transcript = Transcript(alice, bob, seed=num_sessions)
        most = max(most, sum(map(len, transcript.sent.values())))
        num_sessions += 1
        assert num_sessions < 20 * NUM_BUCKETS / MAX_BUCKETS_OF_FULL
    assert most < bytes_of_all / 2
    assert alice.root != bob.root
    assert len(alice.authors) == len(bob.authors) == 199
    assert all(item.author in state for item in common for state in (alice, bob))


def test_a_full_table_is_sent_few_authors_that_it_cannot_take() -> None:
    """Anybody else gets all of them, and what it lacks of authors that it knows comes in any case."""
    common = [member(number) for number in range(1, 40)]
    alice, bob = full_state(1_000, 1_000, *common), full_state(5_000, 1_000, *common)
    news = [notice(number) for number in range(1, 40)]
    bob.merge(Delta(tuple(news)), NOW)
    got = [entry for seed in range(40) for entry in Transcript(alice, bob, seed=seed).initiator_got]
    assert 0 < sum(entry.author not in alice for entry in got) <= 40 * MAX_NEW_TO_FULL
    assert sum(entry in news for entry in got) > MAX_NEW_TO_FULL
    newcomer = state_of()
    Transcript(newcomer, bob)
    assert len(newcomer.authors) == 1_039


def test_a_table_with_little_room_costs_a_session_little() -> None:
    """Otherwise each author that leaves would make all others of a liar travel again."""
    alice, bob = full_state(1_000, 1_000), full_state(5_000, 1_000)
    of_full = sum(map(len, Transcript(alice, bob).sent.values()))
    alice.places.capacity += 10
    assert alice.num_free
    with_room = sum(map(len, Transcript(alice, bob).sent.values()))
    assert with_room < 1.5 * of_full
