"""`python -m kv_canary` is `kv-canary`."""

from kv_canary.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
