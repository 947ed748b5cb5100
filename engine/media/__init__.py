"""Images and sounds of prompts: decoding, processing, and the rows that the model makes of them."""
