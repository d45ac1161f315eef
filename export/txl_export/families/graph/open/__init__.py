"""States that a graph hides, made inputs and outputs."""
