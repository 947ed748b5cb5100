"""Plans the memory of a model, loaded or not."""
