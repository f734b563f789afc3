"""What ``clawstream bench align`` compares, each in a process of its own."""
