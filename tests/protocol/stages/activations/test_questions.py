"""The question whether a microbatch is kept, and its answer."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.protocol.stages.activations import (
    MAX_QUESTION_BYTES,
    TICKET_BYTES,
    Answer,
    Question,
    decode_question,
    encode_question,
)
from farandole.protocol.wire.errors import RemoteProtocolError


@pytest.mark.parametrize("is_kept", [True, False, None])
def test_questions_and_answers_survive_the_wire(is_kept: bool | None) -> None:
    ticket = b"t" * TICKET_BYTES
    for message in (Question(ticket), Answer(ticket, is_kept)):
        payload = encode_question(message)
        assert len(payload) <= MAX_QUESTION_BYTES
        assert decode_question(payload) == message
        for wrong in (payload[:-1], payload + b"\0", encode_question(Question(ticket[1:]))):
            with pytest.raises(RemoteProtocolError):
                decode_question(wrong)


@settings(max_examples=200)
@given(st.binary(max_size=MAX_QUESTION_BYTES), st.sampled_from([b"", b"\x92\x01", b"\x93\x02", b"\x92\x01\xc4\x10"]))
def test_arbitrary_bytes_are_no_question(data: bytes, head: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        assert isinstance(decode_question(head + data), Question | Answer)
