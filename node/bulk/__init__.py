"""Moving contributions between two partners: the exchange's session, the bulk channel and its negotiation."""
