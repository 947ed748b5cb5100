"""The benchmark tools against a server whose answers are known."""
