"""Fuzzing: hostile bytes for everything that reads a file or a text of a user's. See `run`."""
