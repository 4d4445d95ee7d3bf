"""``farandole doctor``: finds step by step what prevents this machine from joining a run, with a remedy each."""
