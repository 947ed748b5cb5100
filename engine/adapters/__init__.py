"""LoRA adapters: low-rank products beside the shared matrices of a model, never merged into them."""
