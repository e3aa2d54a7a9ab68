"""The built-in reward functions, one library per module, imported by name only."""
