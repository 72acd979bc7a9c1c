"""Says what binds anybody's training script: runs it unmodified, with its loaders timed from inside."""
