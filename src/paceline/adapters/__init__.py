"""Other frameworks' runs, traces and launch commands, read into our records. Torch-free; nothing read is executed."""
