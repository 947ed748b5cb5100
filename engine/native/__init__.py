"""A whole step in one native call, for decoders of the common shape."""
