"""Readers of checkpoint files by torch.save, pickle or safetensors; they run no code from the files."""
