"""Dialogue generators, one topic a file: a function from a seeded `Random` to a `Conversation`."""
