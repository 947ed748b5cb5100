"""Chat formats: how a model family writes tool calls and reasoning."""
