"""What every floor may use and that knows nothing of attention: files, random numbers, the environment, plots' look."""
