"""Exports a user's own module with state unchanged, and compares the bundle with the module."""
