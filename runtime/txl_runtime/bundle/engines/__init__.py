"""Engines beside a bundle's graphs: which there are, and the facts that stand beside each."""
