"""Attention over cells, in several implementations that must agree; reference.py is the oracle of the others."""
