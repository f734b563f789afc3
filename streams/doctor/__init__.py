"""Looks at everything a running pipeline rests on, and at what flows through it."""
