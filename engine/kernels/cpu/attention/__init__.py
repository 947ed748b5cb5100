"""Attention over KV cells in C++, and its Python side."""
