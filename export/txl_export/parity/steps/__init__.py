"""Verification of any step with state: bundle and module run the same chains, and every tensor is compared."""
