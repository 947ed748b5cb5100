"""Replicas of the server on Ray Serve. Only proxy.py and options.py are importable without Ray."""
