"""What each component is worth: 8-bit Adam with the buffer or the planner turned off."""
