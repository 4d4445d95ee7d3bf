"""``farandole doctor``: what keeps this machine from joining a run, found step by step, with a remedy each."""
