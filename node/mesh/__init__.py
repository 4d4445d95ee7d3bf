"""The libp2p host: connections, streams, the DHT, relays, hole punching. Only this package imports libp2p."""

from .lean_import import import_lean

import_lean("libp2p")
