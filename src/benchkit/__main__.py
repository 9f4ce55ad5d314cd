"""`python -m benchkit`: the command line."""

from benchkit.cli import main

main()
