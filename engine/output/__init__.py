"""Output text: incremental decoding, stop strings and the stream of a request."""
