"""Packages for a browser: a folder to serve, with a bundle, what runs it in a page, and one page."""
