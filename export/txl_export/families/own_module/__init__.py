"""The user's own module: a step with state, exported as it is and compared with itself."""
