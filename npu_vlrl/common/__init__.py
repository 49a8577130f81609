"""Small parts that every room may use; they import nothing but `types.py`."""
