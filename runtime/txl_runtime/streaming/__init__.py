"""Streams of segments, which applications call, and the loop that an engine implements for them."""
