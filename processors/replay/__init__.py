"""Replays a part of the log through the processors' own code, beside live traffic."""
