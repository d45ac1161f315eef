"""Pictures: SVG and PNG from numbers, without a library. The same numbers give the same bytes."""
