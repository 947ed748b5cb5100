"""`cellar convert`: checkpoints of transformers to GGUF files, and back."""
