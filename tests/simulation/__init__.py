"""Deterministic simulation of the engine: the real core over a model of hashes, with a fake clock and faults."""
