"""Transcription of uploaded sounds."""
