"""What runs in a step: groups, their schedule, the hooks of modules, the methods users call."""
