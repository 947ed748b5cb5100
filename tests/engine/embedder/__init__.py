"""Tests of the embedding model."""
