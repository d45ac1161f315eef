"""Modules that run inside Triton: copied into every package, together with the runtime, all that they import."""
