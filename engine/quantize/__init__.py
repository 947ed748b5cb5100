"""Quantised weights: which layers of a model are replaced, by what, and where what was made of them is kept."""
