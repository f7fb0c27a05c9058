"""Benchmarks.  `python -m bench` lists them; every one writes JSON that README tables come from."""
