"""Benchmarks of farandole, some with raw sockets, libp2p and other projects as baselines: one file per part."""
