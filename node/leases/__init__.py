"""Data leases in a node: what `farandole.protocol.leases` decides, said in the run state and told the trainer."""
