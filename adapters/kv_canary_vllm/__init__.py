"""KV Canary for vLLM: `KV_CANARY=on vllm serve MODEL`.

`plugin.register` is loaded by vLLM's plugin entry point in every process of a server. Two halves do the work:
`scheduler` (in the engine core) writes down what happens to blocks, `worker` (in each worker, beside the memory)
replays it into a ledger and guards the bytes. What they say to each other is in `wire`; `mailbox` is the way back.
"""
