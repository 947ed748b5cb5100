"""Commands for people: a client of the chat API, on a terminal or in a pipe."""
