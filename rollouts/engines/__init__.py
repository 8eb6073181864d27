"""Engines: what samples completions."""
