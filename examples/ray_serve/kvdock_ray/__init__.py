"""kvdock's example engine on Ray Serve: several replicas, and a router that knows what each of them has cached."""
