"""Modules that read and check a bundle on disk: its manifest and tables, its files and its vocabulary."""
