"""Benches of the stream processors; ``clawstream bench`` runs them."""
