"""What runs inside Triton: copied into every package, beside the runtime. It imports nothing else of this project."""
