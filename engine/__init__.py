"""Runs language models for many requests at once: torch, transformers and kvcache; no HTTP."""
