"""Models in GGUF files: the container, configuration, tokenizer and weights."""
