"""How peers find and reach each other: yamux, Kademlia, relays, hole punching."""
