"""The Ollama API."""
