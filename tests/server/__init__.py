"""Tests of server/: against a FakeEngine that plays scripted events."""
