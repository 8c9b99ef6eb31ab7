"""The store: tiers behind a few verbs, promotion and demotion between them, and the reason of everything."""
