"""Replicas of the server on Ray Serve. Without Ray: environment.py, options.py, proxy.py and routing_header.py."""
