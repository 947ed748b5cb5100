"""The embedding model: its layout files, tokenizer, pooling heads and batch scheduler."""
