"""Packages for a browser: a folder to serve, with a bundle, the runtime for pages, and one page."""
