"""Training curves: 8-bit Adam and Muon, under DDP and under ``fully_shard``, beside AdamW."""
