"""KV Canary for SGLang: `KV_CANARY=on python -m sglang.launch_server ...`.

`pools` describes where the bytes of SGLang's KV pools lie.
"""
