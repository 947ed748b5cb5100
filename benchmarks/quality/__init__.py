"""Accuracy of quantised weights."""
