"""Benchmarks that a user can repeat: `dynarl bench NAME`. Ratios against a baseline of the same run, medians, no
thresholds.
"""
