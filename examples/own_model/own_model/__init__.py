"""A model of one's own, for farandole: a small convolutional language model, which is no transformer."""
