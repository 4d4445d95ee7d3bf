"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# Tests assert behaviour, not time: a busy machine may let any one example wait for a second.
settings.register_profile("farandole", deadline=None)
settings.load_profile("farandole")
