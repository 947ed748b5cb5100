"""Triton kernels of attention over cells, for GPUs. Only engine/kernels/dispatch.py imports them, on such a device."""
