"""The served models by the names of requests."""
