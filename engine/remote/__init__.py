"""An engine in a worker process, which the server uses like an engine of its own process."""
