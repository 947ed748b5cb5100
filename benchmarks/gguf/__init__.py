"""GGUF files, beside llama.cpp."""
