"""SGLang as the rollout engine, over its HTTP server. Unverified: written and tested from its documentation."""
