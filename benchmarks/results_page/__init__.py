"""The parts of docs/results.md and of README's section; `benchmarks/results.py` puts them together."""
