"""Files that PyTorch and its relatives write, read without executing anything in them."""
