"""How a model writes reasoning and tool calls: read from its text as it comes, and written as a grammar."""
