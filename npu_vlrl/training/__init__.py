"""Assembly of a run: its parts and processes, evaluations, the warm start, the guard."""
