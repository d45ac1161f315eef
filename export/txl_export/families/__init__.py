"""Model families whose numerics are this project's own, a folder each."""
