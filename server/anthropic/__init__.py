"""Anthropic's messages, over the same turns as OpenAI's chats."""
