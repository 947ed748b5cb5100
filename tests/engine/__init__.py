"""Laws of the engine: the output of a request equals its output alone."""
