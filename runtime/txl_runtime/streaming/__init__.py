"""Streams, which applications call to run segments, and the loop protocol, which each engine implements for them."""
