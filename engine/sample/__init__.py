"""Sampling: from logits to tokens, with filters, penalties, constraints and logprobs."""
