"""Pure plans: which samples are computed together, and where their tokens lie. No tensors, no side effects."""
