"""Recurrent policies: `shape` has their common parts, and one module for each package reads its policies."""
