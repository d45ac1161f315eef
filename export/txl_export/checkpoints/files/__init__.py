"""Readers of checkpoint files, from torch.save, pickle or safetensors, that execute nothing in them."""
