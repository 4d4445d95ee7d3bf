"""The trainer process: runs torch, knows no network."""
