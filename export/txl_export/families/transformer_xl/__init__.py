"""Exports Transformer-XL: has its weights, its reference in plain PyTorch, and networks that graphs are traced from."""
