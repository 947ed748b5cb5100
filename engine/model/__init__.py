"""The model on packed batches: hooks into transformers, layer specifications and runners."""
