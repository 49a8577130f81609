"""The parts of a run and its processes, evaluations, the warm start, the guard, Ctrl-C."""
