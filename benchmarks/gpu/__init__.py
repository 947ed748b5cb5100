"""GPUs: decoding, prompts, profiles and compiled kernels."""
