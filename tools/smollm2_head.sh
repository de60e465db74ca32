#!/usr/bin/env bash
# Writes the text for a head that drafts blocks for SmolLM2, trains it and measures it, on the GPUs of one machine:
#
#   python tools/training_prompts.py DATA prompts.jsonl --count 60000 --widen
#   tools/smollm2_head.sh runs/spark prompts.jsonl
#
# Each stage goes on where it was interrupted; FIRST names the one to begin with (own, generate, fit, eval). What can be
# set, with what is meant for two H200s and 25 minutes:
set -euo pipefail
RUN=$1 PROMPTS=$2
MODEL=${MODEL:-smollm2}
GPUS=${GPUS:-2}           # 0: a CPU, for a try
ENGINES=${ENGINES:-12}    # of a GPU, side by side: one is bound by launches, not by the GPU
OWN=${OWN:-24000}         # prompts that the model is asked to write itself
ANSWERS=${ANSWERS:-4}     # to each prompt
STEPS=${STEPS:-9000}      # of 65,536 tokens, about 11 a second
TOKENS=${TOKENS:-32768}   # of one forward
FIRST=${FIRST:-own}
EVAL=${EVAL:-benchmarks/data/mt_bench.jsonl}
DRAFTWING=${DRAFTWING:-draftwing}

case $FIRST in own | generate | fit | eval) ;; *) echo "FIRST: expected own, generate, fit or eval, found $FIRST" >&2; exit 2 ;; esac
PARTS=$((GPUS > 0 ? GPUS * ENGINES : ENGINES))
OPTIONS="--model $MODEL --quantization none --speculative-algorithm none --max-total-tokens ${POOL:-180000}"
mkdir -p "$RUN"

# each COMMAND: for each engine r a process, all at once; fails where one does.
each() {
  local jobs=() failed=0
  for r in $(seq 0 $((PARTS - 1))); do
    CUDA_VISIBLE_DEVICES=$((GPUS > 0 ? r % GPUS : -1)) RANK=$r WORLD_SIZE=$PARTS LOCAL_RANK=0 "$@" "$r" \
      > "$RUN/$1-$r.log" 2>&1 &
    jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job" || failed=1; done
  [ $failed = 0 ] || { tail -n 2 "$RUN/$1"-*.log; exit 1; }
}
own() {
  [ -e "$RUN/own-$1.jsonl" ] || $DRAFTWING write-prompts $OPTIONS --seed "$1" --count $(((OWN + PARTS - 1) / PARTS)) --out "$RUN/own-$1.jsonl"
}
generate() { $DRAFTWING train generate --out "$RUN/head" "${DATA[@]}" $OPTIONS; }

case $FIRST in own) [ "$OWN" = 0 ] || each own ;; esac
shopt -s nullglob
DATA=(--prompts "$PROMPTS" "$RUN"/own-*.jsonl --eval-prompts "$EVAL" --answers "$ANSWERS" --max-tokens 768
  --greedy-share 0.8 --temperatures 0.3 1.0 --model "$MODEL"
  --algorithm DSPARK --online --draft-layers 3 --ffn-size 1280 --markov-rank 64 --draft-vocab-size 24576
  --draft-lm-head target --block-loss lk_hybrid --optimizer muon --lr 0.008 --batch-tokens "$TOKENS")
case $FIRST in own | generate) each generate ;; esac
case $FIRST in
own | generate | fit)
  FORWARDS=$((GPUS > 1 ? 65536 / TOKENS / GPUS : 65536 / TOKENS))
  $DRAFTWING train fit --out "$RUN/head" "${DATA[@]}" --steps "$STEPS" --accumulate $((FORWARDS > 0 ? FORWARDS : 1)) \
    --gpus $((GPUS > 1 ? GPUS : 1))
  ;;
esac
$DRAFTWING train eval --out "$RUN/head" "${DATA[@]}"
