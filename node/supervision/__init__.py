"""The trainer's supervisor: how it died, whether it hangs, and what becomes of the node then."""
