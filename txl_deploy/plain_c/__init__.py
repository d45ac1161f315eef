"""Packages in plain C: a step of fixed shape as one function that allocates nothing, with no library behind it."""
