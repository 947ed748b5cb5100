"""Reads the files of a model: checkpoint, weights, tokenizer, and the model without weights."""
