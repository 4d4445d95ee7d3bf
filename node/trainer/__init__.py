"""The mesh process' handle on the trainer process, and the messages between the two."""
