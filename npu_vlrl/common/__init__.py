"""Helpers that every room may import; they import nothing of the project but `types.py`."""
