"""Find what a foreign graph remembers: its states, its axes, and sizes with which it runs."""
