"""Predictions against what was measured: our own step benchmark, published tables, and the paper."""
