"""Reads checkpoint files that torch.save, pickle or safetensors wrote; runs no code from the files."""
