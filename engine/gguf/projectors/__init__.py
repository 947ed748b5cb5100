"""The vision towers of mmproj files beside GGUF models, declared by the type of their projector."""
