"""Faults on purpose: a small reference engine, the catalogue of faults that are known from real servers, and what must
raise nothing. `kv-canary faults` runs them.
"""
