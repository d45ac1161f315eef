"""Writes bundles: a bundle gets its name only when it is complete."""
