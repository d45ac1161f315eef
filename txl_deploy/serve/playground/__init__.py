"""Serve the playground: a page on which people try the model."""
