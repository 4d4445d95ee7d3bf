"""Looking at a run and its checkpoints without being a member: list, pull, peek."""
