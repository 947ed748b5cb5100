"""The recipe of the bundled pair: dialogues, tokenizer, target, draft, evaluation, export.

`python -m models.recipe --help` names the stages. Nothing in the server imports this package.
"""
