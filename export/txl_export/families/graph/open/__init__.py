"""Makes hidden states of a graph into inputs and outputs."""
