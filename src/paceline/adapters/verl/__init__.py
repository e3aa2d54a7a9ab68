"""verl: its launch commands (checked, translated) and its logs (imported)."""
