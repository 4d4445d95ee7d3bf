"""How fast contributions move, beside raw sockets, libp2p and other projects: each file one part of the benchmark."""
