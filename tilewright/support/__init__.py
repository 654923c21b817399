"""Helpers without domain knowledge: fingerprints, the event trace, array copies."""
