"""Where prepared descriptors are kept."""
