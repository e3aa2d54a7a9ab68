"""The demo: real weights, a task where learning shows."""
