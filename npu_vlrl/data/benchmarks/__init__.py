"""Published benchmarks, from local files, as parquet in verl's schema; the reward rule `benchmark` scores them."""

from __future__ import annotations

from npu_vlrl.data.benchmarks.convert import BENCHMARKS, convert

__all__ = ["BENCHMARKS", "convert"]
