"""One running node: trio, libp2p, files, processes and clocks, and where protocol/ and training/ meet."""
