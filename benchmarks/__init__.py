"""Speed beside a peer in one run. ``python -m benchmarks.run --help``."""
