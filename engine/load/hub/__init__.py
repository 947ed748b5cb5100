"""Models of the hub and of its local cache."""
