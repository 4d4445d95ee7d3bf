"""Where batches come from: documents, token files, slices of an epoch."""
