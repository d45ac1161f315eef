"""Modules that run inside Triton: copied into every package, beside the runtime. They import only the runtime."""
