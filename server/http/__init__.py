"""HTTP: protocol, limits, authentication, parsing, errors and event streams."""
