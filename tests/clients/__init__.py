"""Other people's clients against a real server. Each environment has packages of its own: `make test-clients`."""
