"""The step benchmark: one rank of N, all but the network real, each implementation in its own process."""
