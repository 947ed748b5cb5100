"""Laws of attention over cells."""
