"""Draw SVG from numbers, without a library; the same numbers give the same bytes."""
