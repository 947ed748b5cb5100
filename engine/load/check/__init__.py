"""Checks the logits of a model at load, selects its runner and stores the outcome."""
