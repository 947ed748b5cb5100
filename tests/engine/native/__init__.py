"""Tests of engine.native."""
