"""The bundled model pair and the recipe that makes it."""
