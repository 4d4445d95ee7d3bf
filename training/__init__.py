"""The torch side: model, data, optimizers, NoLoCo, codecs. Knows no network; importing this package imports no torch."""
