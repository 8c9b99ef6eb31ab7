"""Translations of one engine's calls to store calls; each has an entry point, so that it can be found by its name."""
