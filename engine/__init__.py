"""Runs language models for many requests at once: torch, transformers and kvcache; knows no HTTP."""
