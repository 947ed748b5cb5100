"""The Dockerfile and compose.yaml: their content (fast), and the image (marked container)."""
