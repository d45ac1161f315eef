"""Compares a Transformer-XL's bundle with its reference: log-probabilities, memory rows, and layer by layer."""
