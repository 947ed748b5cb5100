"""OpenAI's Responses API: items, events, tasks and the archive of finished responses."""
