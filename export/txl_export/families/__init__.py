"""Model families whose numerics belong to this project; one folder each."""
