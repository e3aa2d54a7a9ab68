"""One forward pass shared by several ranks: sequence parallelism, tensor parallelism, the split vocabulary."""
