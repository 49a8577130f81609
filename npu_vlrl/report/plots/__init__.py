"""Figures of run folders: `npu-vlrl plot`. Drawing needs matplotlib; reading and grouping runs does not."""
