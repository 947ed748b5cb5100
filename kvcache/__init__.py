"""The shared cache of keys and values: torch, numpy and the standard library; knows no request, text or model code."""
