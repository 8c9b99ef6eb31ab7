"""How the pieces become an engine: the one place that knows model, HBM, store and connector at once."""
