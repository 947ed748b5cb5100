"""Sampling: filters, penalties, constraints, log-probabilities and draft verification."""
