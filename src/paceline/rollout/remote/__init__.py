"""Engines in processes of their own: start them, talk to them, notice when they die."""
