"""Tokenizer, detokenizer and chat template."""
