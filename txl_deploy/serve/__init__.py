"""`txl-deploy serve`: serve many sessions on the rows of one stream, through an HTTP interface that clients know."""
