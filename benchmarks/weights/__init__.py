"""Weights in and out: what loading reads and holds, what a sender does beside its gathers."""
