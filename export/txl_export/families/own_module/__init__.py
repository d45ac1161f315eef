"""Models of the user's own: a module with state is exported as it is and compared with itself."""
