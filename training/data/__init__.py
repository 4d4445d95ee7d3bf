"""Where batches come from: documents, token files, mixtures, slices of an epoch."""
