#!/usr/bin/env bash
# Images for where none can be pulled: Debian with its Python (what `python:3.12-slim` is elsewhere), and over it this machine's own
# Prometheus and Alertmanager. Usage: local_images.sh FOLDER TAG, with FOLDER/pip.conf, and buildah's configuration in the environment.
# An image that exists is not built anew.
set -euo pipefail
folder=$1 tag=$2
python=localhost/kv-canary-python:$tag
certificates=/etc/ssl/certs/ca-certificates.crt

if ! buildah inspect --type image "$python" >/dev/null 2>&1; then
    container=$(buildah from scratch)
    root=$(buildah mount "$container")
    debootstrap --variant=minbase --include=python3,python3-pip,ca-certificates bookworm "$root"
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    if [ -f "$certificates" ]; then
        cp "$certificates" "$root$certificates" # the machine's own, so that pip inside trusts what pip outside trusts
    fi
    cp "$folder/pip.conf" "$root/etc/pip.conf"
    buildah unmount "$container" >/dev/null
    buildah commit --quiet --rm "$container" "$python"
fi

for name in prometheus alertmanager; do
    image=localhost/kv-canary-$name:$tag
    if ! buildah inspect --type image "$image" >/dev/null 2>&1; then
        program=$(command -v "$name" || command -v "prometheus-$name")
        container=$(buildah from "$python")
        buildah copy --quiet "$container" "$program" "/bin/$name"
        if [ -d "/usr/share/prometheus/$name" ]; then
            buildah copy --quiet "$container" "/usr/share/prometheus/$name" "/usr/share/prometheus/$name"
        fi
        buildah config --entrypoint "[\"/bin/$name\"]" "$container"
        buildah commit --quiet --rm "$container" "$image"
    fi
done
