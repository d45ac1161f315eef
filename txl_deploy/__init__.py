"""The command line of txl-deploy."""
