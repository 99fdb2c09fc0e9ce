#!/usr/bin/env bash
# Installs what the stack tests need and this machine lacks, from Debian's packages. Where a Docker engine answers, that is Prometheus
# and Alertmanager alone; elsewhere also podman and what it takes to serve Docker's API, see tests/builders/containers.py.
set -euo pipefail
missing=()
need() { # PROGRAM PACKAGE...
    PATH=$PATH:/usr/sbin:/usr/lib/podman command -v "$1" >/dev/null || missing+=("${@:2}")
}

need prometheus prometheus
need promtool prometheus
need amtool prometheus-alertmanager
need chromium chromium
if ! docker version >/dev/null 2>&1; then
    need docker docker.io
    # netavark calls iptables and names it nowhere
    for program in podman buildah runc debootstrap netavark aardvark-dns iptables; do need "$program" "$program"; done
fi
docker compose version >/dev/null 2>&1 || need docker-compose docker-compose

((${#missing[@]})) || exit 0
root=()
(($(id -u) == 0)) || root=(sudo)
install=("${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq)
"${install[@]}" update && "${install[@]}" install -y --no-install-recommends "${missing[@]}" || {
    echo "apt-get could not install: ${missing[*]}" >&2
    exit 1
}
