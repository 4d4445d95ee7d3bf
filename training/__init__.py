"""Model, data, optimizers, NoLoCo, codecs, on torch. Knows no network; importing this package imports no torch."""
