"""txl-deploy: the command line."""
