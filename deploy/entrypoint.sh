#!/bin/sh
# Opens writes if a token is mounted at its usual place, and becomes the command: signals go to that.
token=/run/secrets/kv-canary-token
if [ -z "${KV_CANARY_TOKEN_FILE:-}" ] && [ -s "$token" ]; then
    export KV_CANARY_TOKEN_FILE="$token"
fi
exec "$@"
