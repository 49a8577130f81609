"""What a run is made of: its parts and processes, evaluations, the warm start, the guard, Ctrl-C."""
