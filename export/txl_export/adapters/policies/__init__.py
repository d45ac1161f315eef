"""What packages' recurrent policies have in common, and one module for each package's way."""
