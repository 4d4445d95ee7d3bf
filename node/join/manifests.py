"""Serves and fetches the run's manifest, a newcomer's first question to a member.

A question has a stream of its own: the run id (32 bytes). An empty frame answers "not here"; otherwise one frame holds
the manifest, which the run id proves.
"""

from __future__ import annotations

import trio

from farandole.protocol.run.manifest import MAX_MANIFEST_BYTES, RUN_ID_BYTES
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.framing import FrameParser, frame

from ..base.errors import PeerUnreachableError
from ..base.streams import Stream, StreamHost, close_stream, receive_frame

MANIFEST_PROTOCOL = "/farandole/manifest/1"
# A question and its small answer.
ANSWER_TIMEOUT = 10.0


def serve_manifest(host: StreamHost, run_id: bytes, manifest: bytes) -> None:
    """Answer newcomers from now on."""

    async def answer(stream: Stream) -> None:
        with trio.fail_after(ANSWER_TIMEOUT):
            question = await receive_frame(stream, FrameParser(RUN_ID_BYTES))
            await stream.send_all(frame(manifest if question == run_id else b"", 2 * MAX_MANIFEST_BYTES))

    host.set_handler(MANIFEST_PROTOCOL, answer)


async def fetch_manifest(host: StreamHost, peer: bytes, run_id: bytes) -> bytes:
    """Ask a peer for the manifest's bytes; the caller verifies them against the run id.

    Raises `PeerUnreachableError` if this peer does not give it; another may.
    """
    try:
        with trio.fail_after(ANSWER_TIMEOUT):
            stream = await host.open_stream(peer, MANIFEST_PROTOCOL)
            try:
                await stream.send_all(frame(run_id, RUN_ID_BYTES))
                raw = await receive_frame(stream, FrameParser(2 * MAX_MANIFEST_BYTES))
            finally:
                await close_stream(stream)
    except (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError, RemoteProtocolError) as error:
        raise PeerUnreachableError(f"no manifest from this peer: {str(error) or 'too slow'}") from error
    if not raw:
        raise PeerUnreachableError("this peer is not in the run")
    return raw
