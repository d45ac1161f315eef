"""Draw SVG from numbers, without a library. The same numbers give the same bytes."""
