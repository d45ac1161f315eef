"""Holds the model families; each folder exports and verifies one kind of model."""
