"""Strangers' files are read and run in a process of their own, which has bounds and may die."""
