"""LoRA adapters: low-rank products next to the shared matrices of a model, never merged into them."""
