"""Output: from tokens to text, stop strings and the stream of a request."""
