"""The records of a run as a page for a browser: one file that needs nothing else, or served while the run goes on."""
