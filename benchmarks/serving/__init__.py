"""One server over HTTP: beside others, under overload, with large bodies."""
