"""A module per verb of the command line, which connects options with functions, and prints tables and progress."""
