"""Engines in a bundle besides its graphs: finds them, and reads the facts about each."""
