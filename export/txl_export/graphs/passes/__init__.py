"""Other forms of a graph that compute the same in less time; one pass a module, in the order of `improving`."""
