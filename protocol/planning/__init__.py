"""What a run needs of its members, and settings that fit them."""
