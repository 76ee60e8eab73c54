"""``kvdock new-backend``: a complete small project for a backend, which passes the kit before a line of it is edited."""

from kvdock_conformance.new_backend.project import NewBackend

__all__ = ["NewBackend"]
