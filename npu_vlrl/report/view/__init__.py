"""Viewer of a run's records in a browser: one self-contained file, or a server while the run goes on."""
