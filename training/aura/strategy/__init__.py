"""How ranks agree on the parameters."""
