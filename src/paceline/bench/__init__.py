"""Benchmarks a person runs with `paceline bench`: this machine's figures, a peer beside them in the same sitting."""
