"""The libp2p host: connections, streams, the DHT, relays, hole punching."""
