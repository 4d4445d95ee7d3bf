"""Mends for faults of libp2p 0.8.1, each seen by running it.

They are subclasses of the library's own classes, so the library stays as it is for anybody else in the process, and
a test can put the two side by side. What is mended, and where:

- an inbound connection kept a task and one of 250 slots for ever: `MendedConn` owns its tasks and ends with them;
- 256 silent sockets shut everybody else out: admission.py (the one that keeps us waiting for longest makes room);
- a length of 2^31 before authentication was allocated: `Socket` (reads are bounded, and few until the handshake is
  done), `BoundedCommunicator` (negotiation messages are short, and few);
- the end of a connection was read a hundred times, and a message in more pieces than that was an error: `Socket.read`
  gives the whole or an error (bounded_reads.py);
- streams waited for their protocol in any number, and connections closed for newcomers by chance: `MendedConn` begins
  few at a time, `MendedSwarm` closes the one of least use;
- plaintext was accepted: `MendedUpgrader` knows Noise and yamux, nothing else;
- identify and Kademlia read a megabyte or four from anybody: `MendedHost` says how much a peer may send;
- an exception in a stream handler or a connection's task ended the host: `MendedHost`, `MendedConn` guard them;
- a frozen peer's connection was never closed: `MendedConn._watch` (ping, and do without a polite end);
- dialling took one address, waited after success, and blocked a peer for 60 s after a failure: `MendedSwarm.dial_peer`
  hands the matter to `Host.connect`;
- peers with keys other than Ed25519, which have no name here: `MendedUpgrader` refuses them.

Its yamux is replaced altogether: see yamux.py.

In the library's tracker, libp2p/py-libp2p: pull request 1426 (after 0.8.1) takes the slot of an inbound connection
otherwise, but of its being kept nothing was found there; 1485 is sockets that the end of a swarm leaves open; 1438 (in
0.8.1) bounds lengths in the DHT and not in multistream; 417 is an exception that takes the listener down.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os

MENDED_RELEASE = "0.8.1"
if importlib.metadata.version("libp2p") != MENDED_RELEASE:
    raise ImportError(
        f"farandole mends faults of libp2p {MENDED_RELEASE}, and this is {importlib.metadata.version('libp2p')}: "
        f"install libp2p=={MENDED_RELEASE}"
    )

# The library reports every peer's every fault, at any level; what matters of it is logged here.
if "LIBP2P_DEBUG" not in os.environ:
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
