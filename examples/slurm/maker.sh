#!/bin/bash
# One maker. With VLLM, the folder of an environment with vLLM and redrb, it samples from a vLLM
# beside it, which loads the model of the variable MODEL.

MAKER=(redrb-maker "$RECIPE" --weights-timeout 1800)
[ "$VLLM" ] || exec "${MAKER[@]}"
PORT=$((10000 + (${SLURM_JOB_ID:-0} * 64 + ${SLURM_LOCALID:-0}) % 20000))
VLLM_SERVER_DEV_MODE=1 "$VLLM/bin/vllm" serve "$MODEL" --weight-transfer-config '{"backend": "redrb"}' \
  --enable-scale-out --logprobs-mode processed_logprobs --max-model-len 2048 \
  --host 127.0.0.1 --port "$PORT" & SERVER=$!
"${MAKER[@]}" --engine-url "http://127.0.0.1:$PORT" --device cpu & WORKER=$!
trap 'kill -TERM $WORKER' TERM
wait $WORKER; STATUS=$?
kill -0 $WORKER 2>/dev/null && { wait $WORKER; STATUS=$?; }
kill -TERM $SERVER; wait $SERVER
exit $STATUS
