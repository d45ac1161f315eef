"""Transformer-XL: its weights, its reference in plain PyTorch, and the networks that graphs are traced from."""
