"""The table of all code that reads a peer's bytes: one line for each decoder, with good inputs to mutate.

`tests/fuzz/test_corpus.py` fails if a decoder of protocol/ is missing here.
"""

from __future__ import annotations

import random
import zlib
from base64 import b32encode
from collections.abc import Callable, Coroutine
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple, cast

import msgspec
from blake3 import blake3
from google.protobuf.message import Message as Protobuf
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.kad_dht.pb.kademlia_pb2 import Message as DhtMessage
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Limit, PeerId, Reservation, StopMessage
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch

from farandole.node.mesh.gate import Introduction, IntroductionAnswer, decode_introduction, decode_introduction_answer
from farandole.node.mesh.libp2p_parts import encode_delimited, multiaddr_texts, receive_message
from farandole.node.mesh.links import MULTISTREAM, Negotiation
from farandole.protocol import programs
from farandole.protocol.checkpoints import block_transfer, blocks, sketches
from farandole.protocol.exchange import exchange, pipe
from farandole.protocol.exchange.bulk import Proposal, decode_proposal
from farandole.protocol.mesh import reachability
from farandole.protocol.mesh.relay import circuit_address, parse_circuit
from farandole.protocol.mesh.yamux import Yamux
from farandole.protocol.rounds import pairing_messages
from farandole.protocol.run import invitations, manifest
from farandole.protocol.run.invite import PREFIX, VERSION, Invite, InviteError, decode_invite, encode_invite
from farandole.protocol.stages import activations
from farandole.protocol.state import antientropy, entries, push
from farandole.protocol.state.state import RunState
from farandole.protocol.wire.errors import ManifestError, RemoteProtocolError
from farandole.protocol.wire.framing import FrameParser, frame
from farandole.protocol.wire.identity import (
    is_signed_by,
    peer_id_bytes,
    peer_id_of,
    public_bytes,
    public_key_of,
    public_key_of_bytes,
    sign,
)
from farandole.protocol.wire.messagepack import encode
from farandole.protocol.wire.record_layer import Opener, Sealer
from farandole.protocol.wire.safetensors import encode_header, parse_header

from ..protocol import authors
from ..protocol.exchange import test_fuzz as exchanges
from ..protocol.exchange.sides import Side
from ..protocol.run.test_manifest import manifest as a_manifest
from ..protocol.stages.activations import conversations as links
from ..protocol.stages.activations.sides import Side as LinkSide
from .samples import samples

NOW = authors.NOW
RUN_ID = authors.RUN_ID
KEY = authors.key_of(1)
SECRET = bytes(range(32))


class Decoder(NamedTuple):
    """Code that reads a peer's bytes. It may raise nothing but ``refusal``."""

    decode: Callable[[bytes], object]
    seeds: list[bytes]
    refusal: type[Exception] | tuple[type[Exception], ...] = RemoteProtocolError
    share: float = 1.0
    """Share of the mutations that other decoders get, for one where each mutation costs much more."""


def of(decode: Callable[[bytes], object], kind: Any) -> Decoder:
    """Return the decoder for messages of a type."""
    return Decoder(decode, samples(kind))


# Conversations


def sync(data: bytes, *, is_initiator: bool) -> object:
    session = antientropy.Session(_state(), random.Random(0), NOW, is_initiator=is_initiator, with_beats=True)
    if is_initiator:
        session.start()
    deltas, _ = session.receive_data(data)
    return [state.merge(delta, NOW) for state in (_state(),) for delta in deltas]


class _Checker(entries.Checker):
    """A checker that remembers whose signatures were genuine, as they are most of the work; bounded."""

    def __init__(self) -> None:
        super().__init__(RUN_ID, authors.CREATOR)
        self._is_genuine = lru_cache(maxsize=1_024)(self._verify)

    def _verify(self, signed: entries.Signed) -> bool:
        return is_signed_by(signed.author, signed.signature, entries.DOMAIN, self.run_id, signed.body)

    def is_genuine(self, entry: entries.Entry) -> bool:
        return self._is_genuine(entry.signed)


_CHECKER = _Checker()


def _state(*more: entries.Signed) -> RunState:
    state = RunState(RUN_ID, authors.CREATOR, checker=_CHECKER)
    state.merge(entries.Delta((authors.member(1), authors.beat(1), authors.progress(2, 5), *more)), NOW)
    return state


def _synced() -> tuple[list[bytes], list[bytes]]:
    """Return the transcripts of a whole session: the initiator's, and the responder's."""
    ends = [
        antientropy.Session(state, random.Random(0), NOW, is_initiator=not number, with_beats=True)
        for number, state in enumerate((_state(authors.member(3)), _state(authors.member(4))))
    ]
    said, data, turn = ([b""], [b""]), ends[0].start(), 0
    while data:
        said[turn].append(said[turn][-1] + data)
        turn = 1 - turn
        _, data = ends[turn].receive_data(data)
    return said[0][1:], said[1][1:]


def hear_pipe(data: bytes) -> object:
    """Feed a pipe: the first byte selects the end and kind of the pipe, and the size of the pieces."""
    how = (data or b"\0")[0]
    end, piece, num_transfers = pipe.Pipe(bool(how & 1), max_message_bytes=100, is_large=bool(how & 2)), 1 + how // 4, 0
    end.begin()
    for start in range(1, len(data), piece):
        end.receive_data(data[start : start + piece])
        while (event := end.next_event()) is not None:
            if isinstance(event, bytes):  # its length gives the size of the transfer
                end.expect(num_transfers, memoryview(bytearray(len(event))))
                num_transfers += 1
    assert len(end.head) <= 5 + 100 + piece
    return end


def hear_exchange(data: bytes) -> object:
    side, digest = Side(False, 200), b""
    for start in range(0, len(data), 5):
        for event in side.receive(data[start : start + 5]):
            if isinstance(event, exchange.Offer):
                side.send(side.offer)
                side.send(side.sealed)
                for chunk in side.chunks():
                    side.send(chunk)
            if isinstance(event, pipe.Sealed):
                digest = event.digest
            if isinstance(event, pipe.TransferReceived):
                assert blake3(side.incoming).digest() == digest
                side.exchange.send(exchange.Accepted())
    return side


def hear_link(data: bytes, *, is_upstream: bool) -> None:
    links.expose(LinkSide(is_upstream, links.FUZZ_SIZE), data, 100)


def hear_yamux(data: bytes, *, is_initiator: bool) -> object:
    conn = Yamux(is_initiator=is_initiator, now=0.0)
    conn.open_stream()
    events = conn.receive_data(data, 1.0)
    while (stream := conn.accept_stream()) is not None:
        stream.read(None, 1.0)
    return events


def _yamux_talk(*, is_initiator: bool) -> bytes:
    alice = Yamux(is_initiator=is_initiator, now=0.0)
    for number in range(3):
        stream = alice.open_stream()
        stream.send(memoryview(b"hello" * number))
        (stream.finish, stream.reset, lambda: None)[number]()
    alice.ping(0.0, 1)
    alice.go_away()
    return alice.data_to_send()


def open_records(data: bytes) -> bytes:
    opener, memory, plain = Opener(SECRET, max_bytes=100), memoryview(bytearray(64)), b""
    while not opener.has_ended:
        if taken := opener.take(memory):
            plain += memory[:taken]
        elif data:
            piece, data = data[: len(opener.wanted)], data[len(opener.wanted) :]
            opener.wanted[: len(piece)] = piece
            opener.received(len(piece))
        else:
            break
    return plain


def _records() -> bytes:
    sealer = Sealer(SECRET, 0.0, max_bytes=100)
    sealed = [bytes(sealer.seal(memoryview(bytes(30)), 0.0)) for _ in range(4)]
    return b"".join([*sealed, sealer.finish(0.0)])


def cut_frames(data: bytes) -> list[bytes]:
    parser, found = FrameParser(100), []
    for start in range(0, len(data), 7):
        parser.receive_data(data[start : start + 7])
        while (payload := parser.next_frame()) is not None:
            found.append(payload)
    parser.receive_eof()
    return found


# Signed messages: signed by the sender, so that forged content gets as far as a member's would


def _bodies() -> list[bytes]:
    items = (authors.member(1), authors.beat(1), authors.progress(1, 9), authors.notice(1))
    signed = [item.body for item in items]
    for kind, rule in entries.RULES.items():
        payloads = map(msgspec.msgpack.decode, samples(rule.payload))
        signed += [msgspec.msgpack.encode([kind, 0, authors.tick_at(kind), payload]) for payload in payloads]
    return signed


def read_index(body: bytes, *, is_signed: bool) -> object:
    raw = body
    if is_signed:
        raw = blocks.encode_signed_index(blocks.SignedIndex(body, sign(KEY, blocks.DOMAIN, RUN_ID, body)))
    return blocks.decode_signed_index(raw, RUN_ID, 2**30)


def _index() -> blocks.SignedIndex:
    index = msgspec.msgpack.decode(samples(blocks.Index)[0], type=blocks.Index)
    size = blocks.BLOCK_BYTES + 1
    index = msgspec.structs.replace(index, author=public_bytes(KEY), run_id=RUN_ID, num_stages=1, stage=0, size=size)
    return blocks.sign_index(KEY, msgspec.structs.replace(index, hashes=bytes(2 * blocks.HASH_BYTES)))


def read_manifest(body: bytes) -> object:
    signed = manifest.SignedManifest(body, public_bytes(KEY), sign(KEY, b"farandole/manifest/1", body))
    return manifest.decode_manifest(signed.encode())


def read_invite(body: bytes) -> Invite:
    """Read an invite whose checksum is right."""
    letters = b32encode(body + zlib.crc32(body).to_bytes(4, "big")).decode().rstrip("=").lower()
    return decode_invite(f"{PREFIX}{VERSION}{letters}")


def check_admission(raw: bytes) -> None:
    invitations.check_admission(invitations.decode_admission(raw), RUN_ID, public_bytes(KEY))


_INVITED = invitations.invite_members(KEY, RUN_ID, SECRET, range(3), int(NOW))
_ADMITTED = _INVITED.admit(RUN_ID, authors.author_of(2), 0)
_ADMISSION = msgspec.msgpack.encode(_ADMITTED)
_WITNESSED = msgspec.structs.replace(
    _ADMITTED, witness=invitations.sign_witness(authors.key_of(3), RUN_ID, _ADMITTED, int(NOW))
)
_MANIFEST = msgspec.msgpack.encode(a_manifest())
_INVITE = Invite(RUN_ID, (f"/ip4/1.2.3.4/tcp/1/p2p/{peer_id_of(authors.author_of(1))}",))
_INVITE_BODY = msgspec.msgpack.encode([RUN_ID, [[authors.author_of(1), "/ip4/1.2.3.4/tcp/1"]], b""])


_HEADER = encode_header({"a": "b"}, [("w", (3, 8)), ("v", (1,))])


# Decoders for libp2p


class _Bytes:
    """A stream that holds these bytes and ends."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        piece, self._data = self._data[:max_bytes], self._data[max_bytes or len(self._data) :]
        return piece

    async def send_all(self, data: bytes) -> None:
        pass


def finish(work: Coroutine[Any, Any, object]) -> object:
    """Run a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as result:
        return result.value
    raise AssertionError("it waits")


def protobuf(kind: type[Protobuf], *seeds: Protobuf) -> Decoder:
    def decode(data: bytes) -> object:
        message = cast("Any", finish(receive_message(cast("Any", _Bytes(data)), kind, 4_096)))
        return [multiaddr_texts(getattr(message, name, ())) for name in ("listen_addrs", "ObsAddrs")]

    return Decoder(decode, [encode_delimited(seed) for seed in seeds])


def negotiate(data: bytes) -> object:
    stream = _Bytes(data)
    return finish(Negotiation(stream.receive_some, stream.send_all).answer(("/a", "/b")))


_ADDRESS = b"\x04\x7f\0\0\1\x06\x0f\xa1"  # /ip4/127.0.0.1/tcp/4001
_PEER = peer_id_bytes(authors.author_of(1))
_PAIR = PeerId(id=_PEER, addrs=[_ADDRESS])

DECODERS: dict[str, Decoder] = {
    "activations-downstream": Decoder(
        lambda data: hear_link(data, is_upstream=False), [b"".join(links.TRANSCRIPTS[True])]
    ),
    "activations-upstream": Decoder(
        lambda data: hear_link(data, is_upstream=True), [b"".join(links.TRANSCRIPTS[False])]
    ),
    "activations-question": of(activations.decode_question, activations.Question | activations.Answer),
    "admission": Decoder(check_admission, [_ADMISSION, msgspec.msgpack.encode(_WITNESSED)]),
    "admission-secret": Decoder(invitations.decode_secret, [encode(_INVITED)]),
    "antientropy-frame": of(antientropy.decode_frame, antientropy.Frame),
    "antientropy-initiator": Decoder(lambda data: sync(data, is_initiator=True), _synced()[1]),
    "antientropy-responder": Decoder(lambda data: sync(data, is_initiator=False), _synced()[0]),
    "block-answered": of(block_transfer.decode_answered, block_transfer.Answered),
    "block-asked": of(block_transfer.decode_asked, block_transfer.Asked),
    "block-given": of(block_transfer.decode_given, block_transfer.Given),
    "block-question": of(block_transfer.decode_question, block_transfer.BlockQuestion),
    "block-index": Decoder(lambda raw: read_index(raw, is_signed=False), [blocks.encode_signed_index(_index())]),
    "block-index-body": Decoder(lambda body: read_index(body, is_signed=True), [_index().body]),
    "bulk-proposal": of(decode_proposal, Proposal),
    "bulk-records": Decoder(open_records, [_records()]),
    "checkup-clock": of(reachability.decode_clock, reachability.ClockAnswer),
    "circuit-address": Decoder(
        lambda data: parse_circuit(data.decode(errors="replace")),
        [circuit_address("/ip4/1.2.3.4/tcp/1", authors.author_of(1)).encode()],
    ),
    "delta": Decoder(
        lambda raw: _state().merge(entries.decode_delta(raw), NOW), [encode(authors.everything(_state()))]
    ),
    "entry": Decoder(lambda body: _state().merge(entries.Delta((authors.sign_body(1, body),)), NOW), _bodies()),
    "exchange-control": of(exchange.decode_control, exchange.Control),
    "exchange-offer": Decoder(
        exchange.decode_first, [exchanges.TRANSCRIPT[4 : 4 + int.from_bytes(exchanges.TRANSCRIPT[:4], "big")]]
    ),
    "exchange-session": Decoder(hear_exchange, [exchanges.TRANSCRIPT]),
    "framing": Decoder(cut_frames, [frame(b"x" * 10, 100) + frame(b"", 100)]),
    "introduction": of(decode_introduction, Introduction),
    "introduction-answer": of(decode_introduction_answer, IntroductionAnswer),
    "invite-body": Decoder(read_invite, [_INVITE_BODY], InviteError),
    "invite-text": Decoder(
        lambda data: decode_invite(data.decode(errors="replace")), [encode_invite(_INVITE).encode()], InviteError
    ),
    "manifest": Decoder(
        manifest.decode_manifest, [manifest.sign_manifest(manifest.decode_body(_MANIFEST), KEY).encode()], ManifestError
    ),
    "manifest-body": Decoder(read_manifest, [_MANIFEST], ManifestError),
    "multistream": Decoder(negotiate, [b"\x13" + MULTISTREAM.encode() + b"\n\x03/x\n\x03/b\n"]),
    "outcome-question": of(exchange.decode_question, exchange.Question),
    "outcome-answer": of(exchange.decode_answer, exchange.Answer),
    "pairing": of(pairing_messages.decode_message, pairing_messages.Message),
    "peer-id": Decoder(public_key_of_bytes, [_PEER]),
    "peer-id-text": Decoder(
        lambda data: public_key_of(data.decode(errors="replace")), [peer_id_of(authors.author_of(1)).encode()]
    ),
    "pipe": Decoder(
        hear_pipe,
        [bytes((number,)) + frame(b"\0" + message, 1_000) for number in (3, 251) for message in samples(pipe.Control)],
    ),
    "pipe-control": of(pipe.decode_control, pipe.Control),
    "program-answer": of(programs.decode_answer, programs.Answer),
    "program-request": of(programs.decode_request, programs.Request),
    "protobuf-dht": protobuf(DhtMessage, DhtMessage(type=DhtMessage.FIND_NODE, key=bytes(34))),
    "protobuf-hop": protobuf(
        HopMessage,
        HopMessage(type=HopMessage.CONNECT, peer=_PAIR),
        HopMessage(type=HopMessage.STATUS, reservation=Reservation(expire=9, addrs=[_ADDRESS])),
    ),
    "protobuf-identify": protobuf(Identify, Identify(listen_addrs=[_ADDRESS], protocols=["/a"])),
    "protobuf-punch": protobuf(HolePunch, HolePunch(type=HolePunch.CONNECT, ObsAddrs=[_ADDRESS])),
    "protobuf-stop": protobuf(StopMessage, StopMessage(type=StopMessage.CONNECT, peer=_PAIR, limit=Limit(data=5))),
    "push": of(push.decode_batch, push.Batch),
    "reachability-request": of(reachability.decode_request, reachability.Request),
    "reachability-answer": of(
        lambda raw: reachability.decode_answer(raw, reachability.Request((4_001,))), reachability.DialBackAnswer
    ),
    "safetensors": Decoder(lambda raw: parse_header(raw, len(_HEADER) + 100), [_HEADER]),
    "shared-file-index": Decoder(
        lambda raw: programs.decode_index(raw, sha256(raw).hexdigest()),
        [msgspec.msgpack.encode(programs.FileIndex(programs.BLOCK_BYTES + 1, (bytes(32), bytes(32))))],
    ),
    "sketch-answer": Decoder(sketches.decode_answer, [sketches.encode_answer(bytes(size)) for size in (0, 1_024)]),
    "sketch-question": of(sketches.decode_question, sketches.SketchQuestion),
    "visitor-pass": of(invitations.decode_pass, invitations.VisitorPass),
    "witness": of(invitations.decode_witness, invitations.Witness),
    "yamux-dialled": Decoder(lambda data: hear_yamux(data, is_initiator=True), [_yamux_talk(is_initiator=False)]),
    "yamux-accepted": Decoder(lambda data: hear_yamux(data, is_initiator=False), [_yamux_talk(is_initiator=True)]),
}
