"""The kit of engine tests: tiny random models, engines stepped by hand, and transformers as the reference.

A test loads a family's tiny model, plays requests and compares the tokens (CONTRIBUTING.md shows one).
`loaded` and `reference` are fixtures of tests/engine/conftest.py, shared by the session: loading takes most of a test.

models       tiny models by family with a tokenizer in a folder; `core`, an engine without a thread; `Reference`
play         steps a core: jobs that arrive and leave at steps, and their answers
mixes        random mixes of requests, for properties of any batch
machine      an engine over a simulated machine, with step times by their work
encoders     tiny models with images and audio for their cross attention
contents     tiny models with images or sounds in their prompts; content_models: with their processors
tiny         settings of one tiny model for every family of docs/models-checked.md
checkpoints  published checkpoints with tiny widths (list: checkpoint_list), and the table of docs/models.md
families     the checks of that table; outliers: calibration; invariance: batch invariance; resumed: cached prefixes
speculated   greedy text with and without drafts
tokenizers   tokenizers of every kind, and random token streams
gemma        a trained checkpoint with outliers
"""
