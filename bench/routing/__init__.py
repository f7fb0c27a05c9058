"""Routing lab."""
