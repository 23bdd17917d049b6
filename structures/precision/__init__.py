"""Quantised weights of an attached model: which, how, at what fidelity, and how to undo it."""
