"""``clawstream demo``: the whole loop on one machine, with simulated users."""
