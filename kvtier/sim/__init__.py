"""Workloads on record, replayed through the classes that serve: traces, one tier's hit rates, a ladder of tiers."""
