"""The tiers below DRAM, as the store sees them: over persistent slots, and over names."""
