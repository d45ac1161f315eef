"""Passes that change a graph so that it computes the same in less time; one per module, ordered in `improving`."""
