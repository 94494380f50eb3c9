#!/bin/bash
# One maker. With VLLM, the folder of an environment with vLLM and redrb, it samples from a vLLM
# beside it, which loads the model of the variable MODEL.

MAKER=(redrb-maker "$RECIPE" --weights-timeout 1800)
set -m  # own process groups: Slurm signals this shell only, which hands on one signal, in order
if [ "$VLLM" ]; then
  PORT=$((10000 + (${SLURM_JOB_ID:-0} * 64 + ${SLURM_LOCALID:-0}) % 20000))
  VLLM_SERVER_DEV_MODE=1 "$VLLM/bin/vllm" serve "$MODEL" --weight-transfer-config '{"backend": "redrb"}' \
    --enable-scale-out --logprobs-mode processed_logprobs --max-model-len 2048 \
    --host 127.0.0.1 --port "$PORT" & SERVER=$!
  MAKER+=(--engine vllm --engine-url "http://127.0.0.1:$PORT" --device cpu)
fi
"${MAKER[@]}" & WORKER=$!
trap 'trap "" TERM; kill -TERM $WORKER' TERM  # a second signal would break off a maker that ends
wait $WORKER; STATUS=$?
kill -0 $WORKER 2>/dev/null && { wait $WORKER; STATUS=$?; }
[ -z "$SERVER" ] || { kill -TERM $SERVER; wait $SERVER; }
exit $STATUS
