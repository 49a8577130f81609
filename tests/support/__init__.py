"""Real tokenizers and templates for tests, taken from installed packages."""
