"""What holds for all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# Tests compare bits: of two processes, of a model and its stages. torch's results depend on the number of threads and
# on how MKL divides a product, so every process of the tests has one thread and MKL's reproducible mode. Both are read
# when torch is loaded, which is later than this, and inherited by the processes that tests start.
os.environ.update(OMP_NUM_THREADS="1", MKL_CBWR="AUTO")

# Tests assert behaviour, not time: a busy machine may let any one example wait for a second.
settings.register_profile("farandole", deadline=None)
settings.load_profile("farandole")
