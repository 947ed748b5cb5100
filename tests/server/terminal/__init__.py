"""Commands on a real pseudo-terminal, against a server with the bundled model."""
