"""What a training step costs before it is launched: time, memory and what binds, on any number of GPUs."""
