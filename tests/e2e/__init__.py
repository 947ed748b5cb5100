"""Tests of the whole: a real server, the real engine, the bundled model, other people's clients."""
