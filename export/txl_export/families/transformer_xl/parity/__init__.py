"""Comparison of a Transformer-XL's bundle with its reference: log-probabilities, memory rows, layers."""
