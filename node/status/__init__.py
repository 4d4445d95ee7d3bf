"""What a node tells of itself: collected, and shown in words."""
