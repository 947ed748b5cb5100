"""Cache-aware routing: which replica of the server gets a request. Values and pure functions, no I/O, no engine."""
