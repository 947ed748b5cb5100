"""The tests mirror the tree: kvcache, engine and server, then e2e (all of it) and house (the rules of the code)."""
