"""Run the command line for `python -m txl_deploy`."""

from txl_deploy.main import main

main()
