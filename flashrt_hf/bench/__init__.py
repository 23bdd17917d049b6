"""Benchmarks: FlashRT and its peers in one run, checked before they are timed, kept as records."""
