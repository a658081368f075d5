"""From the arguments of ``fully_shard`` to groups, compared with the other ranks before anything changes."""
