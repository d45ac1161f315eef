"""`txl-deploy serve`: serve many sessions on the rows of one stream, with an interface that existing clients speak."""
