"""Images and sounds of requests: inline, uploaded or fetched bytes, checked before the engine gets them."""
