"""Pure mathematics of the algorithms: advantages, losses, KL, reward shaping. No state, no input or output."""
