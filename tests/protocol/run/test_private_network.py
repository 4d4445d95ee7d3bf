from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.run.invite import NETWORK_KEY_BYTES, NONCE_BYTES, cipher_of, network_key_of

KEY, NONCE = bytes(range(NETWORK_KEY_BYTES)), bytes(NONCE_BYTES)


def test_holders_of_the_key_read_what_was_written_in_whatever_pieces() -> None:
    sender, receiver = cipher_of(KEY, NONCE), cipher_of(KEY, NONCE)
    pieces = [sender.update(piece) for piece in (b"", b"a", b"rather more", bytes(100_000))]
    assert b"".join(receiver.update(bytes([byte])) for byte in b"".join(pieces[:3])) == b"arather more"
    assert receiver.update(pieces[3]) == bytes(100_000)


def test_another_key_or_another_nonce_is_another_cipher() -> None:
    streams = {cipher_of(key, nonce).update(bytes(32)) for key in (KEY, bytes(32)) for nonce in (NONCE, b"n" * 32)}
    assert len(streams) == 4


def test_a_known_answer() -> None:
    """HKDF-SHA256 and ChaCha20, so that both ends agree in all versions."""
    creator = Ed25519PrivateKey.from_private_bytes(bytes(32))
    assert (
        network_key_of(creator, bytes(32)).hex() == "4c00e338770fc90aab428d1ac8883187026427f44327e644c9dce12a42e51687"
    )
    assert cipher_of(KEY, NONCE).update(bytes(16)).hex() == "df58931b034827f7de18f20d96c112c9"


def test_the_key_differs_by_run_and_creator() -> None:
    creators = [Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(2)]
    assert len({network_key_of(creator, run) for creator in creators for run in (bytes(32), b"r" * 32)}) == 4
