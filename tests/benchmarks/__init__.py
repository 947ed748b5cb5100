"""The benchmark tools against a server with known answers."""
