"""The C++ kernels of the CPU, and how Python builds and calls them. Includes are relative to this folder."""
