"""What ``kvdock new-backend`` writes: `package` is the backend, as a package that works here too; ``project/`` is what is around it."""
