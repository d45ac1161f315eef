"""Models with state that are not this project's: small modules that take the weights of another package's model.

They were written from the papers and from the names and shapes of the tensors. What the packages compute is stored in
`fixtures/oracle_stateful`, which the modules are held against.
"""
