"""TRL: its trainer state and logs."""
