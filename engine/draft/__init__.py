"""Speculative decoding: drafters, their caches and the depth of drafts; drafts never change the output."""
