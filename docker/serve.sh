#!/bin/sh
# serve.sh REPOSITORY [ARGUMENT...]: Triton serves that model repository; arguments are tritonserver's own.
# serve.sh --ready: fails unless the server of this container and its model are ready. The image's health check.
set -eu
server=$TRITON/pytriton/tritonserver

if [ "$1" = --ready ]; then
    exec python3 -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=4)' \
        "http://127.0.0.1:$HTTP_PORT/v2/health/ready"
fi

repository=$1
shift
exec "$server/bin/tritonserver" \
    --model-repository="$repository" \
    --backend-directory="$server/backends" \
    --disable-auto-complete-config \
    --http-port="$HTTP_PORT" --grpc-port="$GRPC_PORT" --metrics-port="$METRICS_PORT" \
    --exit-timeout-secs=60 \
    "$@"
