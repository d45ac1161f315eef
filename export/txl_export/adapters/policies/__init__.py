"""Reads recurrent policies: `shape` has what all have in common, and one module per package reads that package's."""
