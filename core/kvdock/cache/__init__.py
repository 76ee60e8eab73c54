"""The caches: tensors that hold keys and values. `interface` has the contract, `factory` makes them."""
