"""How backends are found, loaded and chosen: `hookspecs`, then `discovery`, then `registry`."""
