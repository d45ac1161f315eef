"""Engines as backends of devices load them: what they are, which of them fit, and how those of TensorRT run."""
