"""Replicas of the server on Ray Serve. Only proxy.py, routing_header.py and options.py are importable without Ray."""
