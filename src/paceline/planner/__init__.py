"""What a run will need before it starts: memory now, time and placement later. Torch-free."""
