"""Fewer bytes between the copies of a model that HSDP keeps: what is sent, what is held back, and when."""
