"""Lets ``python -m kvdock`` do what the console script does."""

from kvdock.cli import main

main()
