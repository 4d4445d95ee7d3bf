from __future__ import annotations

import string

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.run.invite import (
    MAX_ADDRESSES,
    MAX_INVITE_CHARS,
    NETWORK_KEY_BYTES,
    NONCE_BYTES,
    Invite,
    InviteError,
    cipher_of,
    decode_invite,
    encode_invite,
    is_invite,
    network_key_of,
)
from farandole.protocol.wire.identity import peer_id_of

ALICE = peer_id_of(Ed25519PrivateKey.from_private_bytes(b"a" * 32).public_key().public_bytes_raw())
ADDRESS = f"/ip4/203.0.113.7/tcp/4001/p2p/{ALICE}"
INVITE = Invite(bytes(range(32)), (ADDRESS, f"/dns4/farandole.example/tcp/4001/p2p/{ALICE}"), b"admitted")
TEXT = encode_invite(INVITE)
SHORT = encode_invite(Invite(bytes(range(32))))

ports = st.integers(0, 65_535)
transports = st.builds("/ip4/{}/tcp/{}".format, st.ip_addresses(v=4), ports) | st.builds(
    "/dns4/{}/tcp/{}".format, st.text(string.ascii_lowercase + ".", min_size=1, max_size=100), ports
)
peers = st.binary(min_size=32, max_size=32).map(peer_id_of)
addresses = st.builds(lambda transport, peer: f"{transport}/p2p/{peer}", transports, peers)
invites = st.builds(
    Invite,
    st.binary(min_size=32, max_size=32),
    st.lists(addresses, max_size=MAX_ADDRESSES).map(tuple),
    st.binary(max_size=1_024),
)


@given(invites)
def test_round_trip(invite: Invite) -> None:
    text = encode_invite(invite)
    assert decode_invite(text) == invite
    assert len(text) <= MAX_INVITE_CHARS
    assert set(text) <= set(string.ascii_lowercase + string.digits)


def test_blanks_line_breaks_and_capitals_do_not_matter() -> None:
    assert decode_invite(f"  {TEXT[:40]}\n{TEXT[40:].upper()} \n") == INVITE


@given(st.integers(0, len(SHORT) - 1), st.sampled_from(string.ascii_lowercase + string.digits + "-é"))
def test_every_wrong_character_is_noticed(place: int, letter: str) -> None:
    if SHORT[place] != letter:
        with pytest.raises(InviteError):
            decode_invite(SHORT[:place] + letter + SHORT[place + 1 :])


def test_every_swap_of_neighbours_and_every_truncation_is_noticed() -> None:
    for i in range(len(SHORT)):
        swapped = SHORT[:i] + SHORT[i + 1 : i + 2] + SHORT[i] + SHORT[i + 2 :]
        for damaged in {swapped, SHORT[:i], SHORT[i + 1 :], SHORT[:i] + SHORT[i + 1 :]} - {SHORT}:
            with pytest.raises(InviteError):
                decode_invite(damaged)


def test_a_damaged_invite_is_refused_with_what_to_do() -> None:
    with pytest.raises(InviteError, match="character 21 is '0', but only"):
        decode_invite(TEXT[:20] + "0" + TEXT[21:])
    with pytest.raises(InviteError, match="checksum does not fit"):
        decode_invite(TEXT[:-9])


def test_what_is_no_invite_is_told_from_a_damaged_one_and_overlong_text_is_not_parsed() -> None:
    with pytest.raises(InviteError, match="not an invite"):
        decode_invite("run.manifest")
    with pytest.raises(InviteError, match="another version"):
        decode_invite("farandole2" + TEXT[10:])
    assert is_invite(f" {TEXT}")
    assert not is_invite("run.manifest")
    with pytest.raises(InviteError, match="at most"):
        decode_invite("farandole1" + "a" * 1_000_000)


@pytest.mark.parametrize(
    "fields",
    [
        {"run_id": b"short"},
        {"run_id": bytes(32), "addresses": (ADDRESS,) * 9},
        {"run_id": bytes(32), "admission": bytes(1_025)},
        {"run_id": bytes(32), "addresses": ("/ip4/1.2.3.4/tcp/1",)},
        {"run_id": bytes(32), "addresses": (f"ip4/1.2.3.4/p2p/{ALICE}",)},
        {"run_id": bytes(32), "addresses": (f"/ip4/1.2.3.4 /tcp/1/p2p/{ALICE}",)},
        {"run_id": bytes(32), "addresses": ("/ip4/1.2.3.4/tcp/1/p2p/12D3KooWnot",)},
        {"run_id": bytes(32), "addresses": (f"/dns4/{'a' * 256}/tcp/1/p2p/{ALICE}",)},
    ],
)
def test_fields_out_of_bounds_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InviteError):
        Invite(**fields)  # type: ignore[arg-type]


# The key of a private run

NETWORK_KEY, NONCE = bytes(range(NETWORK_KEY_BYTES)), bytes(NONCE_BYTES)


def test_another_key_nonce_run_or_creator_gives_another_stream() -> None:
    keys, nonces = (NETWORK_KEY, bytes(32)), (NONCE, b"n" * 32)
    assert len({cipher_of(key, nonce).update(bytes(32)) for key in keys for nonce in nonces}) == 4
    creators = [Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(2)]
    assert len({network_key_of(creator, run) for creator in creators for run in (bytes(32), b"r" * 32)}) == 4


def test_a_known_answer() -> None:
    """HKDF-SHA256 and ChaCha20, so that both ends agree in all versions."""
    creator = Ed25519PrivateKey.from_private_bytes(bytes(32))
    assert (
        network_key_of(creator, bytes(32)).hex() == "4c00e338770fc90aab428d1ac8883187026427f44327e644c9dce12a42e51687"
    )
    assert cipher_of(NETWORK_KEY, NONCE).update(bytes(16)).hex() == "df58931b034827f7de18f20d96c112c9"
