"""One module per verb: wiring, tables and progress, no numerics."""
