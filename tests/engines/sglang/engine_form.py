"""`python engine_form.py MODEL`: an `sglang.Engine` in a program of its own; prints its answers as JSON.

The scheduler is a process that the engine spawns, so this must be a file that can be imported without doing anything.
"""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":
    import sglang

    from builders.sglang_serving import OPTIONS, traffic

    options = {name.replace("-", "_"): value for name, value in OPTIONS.items()}
    engine = sglang.Engine(model_path=sys.argv[1], **options)
    sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    answers = engine.generate(input_ids=traffic(16, 0), sampling_params=sampling)
    print(json.dumps({"pid": os.getpid(), "tokens": [answer["output_ids"] for answer in answers]}), flush=True)
    sys.stdin.readline()  # the test looks at the scheduler meanwhile
    engine.shutdown()
