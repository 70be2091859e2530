"""Linear attention that reads every tensor once."""
