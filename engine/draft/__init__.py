"""Guesses at what comes next, how many of them pay, and the rules that verify them; no guess ever changes a text."""
