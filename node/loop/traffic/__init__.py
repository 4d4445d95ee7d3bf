"""The traffic that a node may use in a calendar month: counted, stored, and spent evenly."""
