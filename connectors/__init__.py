"""Translations of one engine's calls to store calls; each is found by its entry point."""
