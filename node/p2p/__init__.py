"""What of libp2p a node uses, and the mends of its faults: nobody else imports it."""
