"""OpenAI's Responses: items in and out, their events, and what is kept of them."""
