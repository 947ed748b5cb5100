"""The HTTP front end: OpenAI's wire format over one engine; never touches torch, transformers or kvcache."""
