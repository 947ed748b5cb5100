"""Measures servers from outside, by their public wire format alone: any that speaks OpenAI's, not only ours."""
