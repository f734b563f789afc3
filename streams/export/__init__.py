"""Scored segments as files for other trainers."""
