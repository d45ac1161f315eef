"""Modules that find a bundle's engines and read the facts about each engine."""
