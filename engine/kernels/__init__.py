"""Attention and products on the CPU: C++ kernels, and plain torch as reference and fallback."""
