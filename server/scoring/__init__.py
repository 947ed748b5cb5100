"""Scoring: rerank, score and classification."""
