"""A foreign file, from its bytes to a module that stands for it and to programs."""
