"""Prometheus metrics of one app."""
