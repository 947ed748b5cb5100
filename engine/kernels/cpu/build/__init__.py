"""The libraries of the C++ kernels: built, found, checked and packed into wheels."""
