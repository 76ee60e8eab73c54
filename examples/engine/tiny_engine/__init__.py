"""An engine small enough to read, on kvdock; README.md says which idea is in which file."""
