"""Writing a bundle: all of it or nothing."""
