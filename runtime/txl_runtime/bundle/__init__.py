"""A bundle on disk: its manifest and tables, reading and checking its files, its vocabulary."""
