"""Lets ``python -m kvdock.cli`` do what the console script does."""

from kvdock.cli import main

main()
