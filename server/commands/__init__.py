"""Commands of `cellar` on the console."""
