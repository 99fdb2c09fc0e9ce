"""Fingerprints: 64 bits for each (page, stripe). `spec` is the definition, the backends are bit-equal to it."""
