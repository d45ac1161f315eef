"""Passes change a graph so that it computes the same in less time; each pass is a module, `improving` has the order."""
