"""Published benchmarks, converted from local files to parquet in verl's schema and scored by the rule `benchmark`."""
