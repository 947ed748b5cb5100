"""Laws of the engine: what a request gets equals what it would get alone."""
