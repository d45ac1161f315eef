"""One module per verb of the command line: it connects options with functions, and prints tables and progress."""
