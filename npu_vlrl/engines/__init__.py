"""Engines sample turns: in the learner's process, in processes of their own, in rounds or asynchronously."""
