"""What a node may move in a calendar month: counted, kept, and spent evenly."""
