"""Proves that the text of a model is the same cold, cached, batched, drafted, preempted and shifted."""
