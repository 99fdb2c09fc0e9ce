#!/usr/bin/env bash
# make_env.sh PYTHON DIR: a virtual environment in which SGLang serves on a CPU, with this checkout installed into it.
set -euo pipefail
readonly python=$1 dir=$2 version=0.5.23 here=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
cd "$here/../../.."

"$python" -m venv "$dir"
pip=("$dir/bin/python" -m pip --quiet --disable-pip-version-check install -c constraints.txt)
# Of what SGLang asks for, what serving on a CPU needs; torchvision and torchaudio must stay out, they bring a torch for
# CUDA. The last line is what the daemon and the tests add.
"${pip[@]}" torch numpy transformers==5.19.0 openai==2.8.0 aiohttp einops fastapi interegular ipython jsonschema msgspec \
    orjson packaging partial-json-parser pillow prometheus-client psutil pybase64 pydantic python-dateutil \
    python-multipart pytz pyzmq regex requests setproctitle tqdm uvicorn uvloop xxhash \
    numba==0.65.1 httpx pytest pytest-timeout
# SGLang itself asks for CUDA builds of everything, so it comes without what it asks for, and last: pip would complain.
"${pip[@]}" --no-deps "sglang==$version" triton apache-tvm-ffi==0.1.11 compressed-tensors dill gguf loguru pandas \
    sentencepiece xgrammar
"${pip[@]}" --no-deps -e .
site=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp "$here/cpu_stubs.py" "$site/kv_canary_cpu_stubs.py"
echo 'import kv_canary_cpu_stubs; kv_canary_cpu_stubs.install()' >"$site/kv_canary_cpu_stubs.pth"
SGLANG_USE_CPU_ENGINE=1 "$dir/bin/python" -c 'import sglang; print("SGLang", sglang.__version__)'
