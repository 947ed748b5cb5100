"""The store of responses: SQLite or PostgreSQL."""
