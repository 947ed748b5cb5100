"""Attention on the CPU in C++: its source, how it is built, and how Python calls it."""
