"""Modules that run inside Triton: copied into every package, beside the runtime, which is all that they import."""
