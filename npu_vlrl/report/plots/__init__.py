"""`npu-vlrl plot`: figures made of run folders. Drawing needs matplotlib; reading and grouping runs does not."""
