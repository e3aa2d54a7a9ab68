"""Rollout as a service: an OpenAI-compatible server over a streaming engine."""
