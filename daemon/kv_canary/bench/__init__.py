"""The benchmark room: how fast pages are read here, what the hooks cost, and what an engine loses.

Every figure is held against something that was measured in the same run on the same bytes. Used by `kv-canary bench`
alone; a server never imports it.
"""
