"""A separate process with limits of memory and time, in which files from strangers are read and run."""
