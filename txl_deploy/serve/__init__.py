"""`txl-deploy serve`: many sessions over the rows of one stream, behind an interface that existing clients speak."""
