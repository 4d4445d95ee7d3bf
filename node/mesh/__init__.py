"""The libp2p host: connections, streams, the DHT, relays, hole punching. Only this room imports libp2p."""
