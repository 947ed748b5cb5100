"""The KV cache: torch, numpy and the standard library. It has no requests, no text and no model code."""
