"""What numbers a codec takes."""

from __future__ import annotations

# Rounding upwards can at most double a value, so what is encoded below this decodes finite.
MAX_MAGNITUDE = 2.0**126
MAX_FP16 = 65_504.0
MIN_SCALE = 2.0**-126  # the least normal number: blocks of zeros and denormals need no case of their own
