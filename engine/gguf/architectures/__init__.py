"""The architectures of GGUF files: settings and tensors, each declared once for reading and for writing."""
