"""kvtier keeps the attention state of an LLM server in four tiers and gives it back by prefix hash."""
