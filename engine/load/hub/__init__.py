"""Models of the hub, and those in its local cache."""
