"""``farandole status --watch``: a node on a full screen, this machine's or another's."""
