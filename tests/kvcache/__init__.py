"""Laws of the shared cache."""
