"""Tests of engine/kernels/triton: without a GPU, by the interpreter of Triton."""
