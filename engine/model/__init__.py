"""The model on packed batches: hooks into transformers and layer specifications."""
