"""Published benchmarks, from local files, as parquet in verl's schema; the reward rule `benchmark` scores them."""
