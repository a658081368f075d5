"""Transports of gradients: how what autograd made becomes this rank's part of the sum."""
