"""vLLM as the rollout engine: in a process of its own, in the trainer's, or as a server."""
