"""Products with plain and quantised matrices in C++, and their Python side."""
