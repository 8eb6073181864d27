"""The tasks of `benchmarks/budget.py`; described in docs/budget.md."""
