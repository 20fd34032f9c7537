"""What follows a run while it trains: guards, best, target, rates, progress, logs."""
