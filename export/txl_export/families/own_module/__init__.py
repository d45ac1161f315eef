"""Exports a user's own module that has a state, as it is, and compares the bundle with the module."""
