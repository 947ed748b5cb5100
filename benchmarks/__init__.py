"""Measures servers from outside, by their public wire format alone; imports nothing of Cellar."""
