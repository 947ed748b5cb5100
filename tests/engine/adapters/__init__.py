"""Tests of engine/adapters."""
