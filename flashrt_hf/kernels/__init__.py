"""Kernel families: where their sources and builds are, how to build, check and load them."""
