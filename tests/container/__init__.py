"""The Dockerfile and compose.yaml: what they say (fast), and what the image does (marked container)."""
