"""A separate process with bounds of memory and time, in which strangers' files are read and run."""
