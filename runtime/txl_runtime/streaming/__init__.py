"""What an application calls: streams of segments, and the loop that an engine implements for them."""
