"""What a group is made of: its mesh, its plan, its parameters and their persistent shards."""
