"""Media that ship with kvtier; each is found by its URL scheme's entry point."""
