"""Write packages in plain C: a step of fixed shape as one function that allocates nothing and needs no library."""
