"""Leaf helpers with no domain words: fingerprints, the event trace, array copies."""
