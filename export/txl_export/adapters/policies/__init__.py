"""Reads recurrent policies: `shape` has their common parts, and one module per package reads the package's policies."""
