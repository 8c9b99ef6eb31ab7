"""Eviction policies: who goes first when a pool needs room."""
