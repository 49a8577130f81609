"""Data: converts rows of files and generated items to `Task`s, and images to the input of a vision tower."""
