"""Options and their sources."""
