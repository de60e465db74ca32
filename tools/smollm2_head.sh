#!/usr/bin/env bash
# Writes the text for a head that drafts blocks for SmolLM2, trains it and measures it, on the GPUs of one machine:
#
#   python tools/training_prompts.py DATA prompts.jsonl --count 60000 --widen
#   tools/smollm2_head.sh runs/spark prompts.jsonl
#
# Each stage goes on where it was interrupted, but prompts of its own, which an engine writes anew; FIRST names the one to
# begin with (own, generate, fit, eval). What can be set, with what is meant for an H200 and 30 minutes. Answers are short
# since long greedy ones repeat themselves; every token of them opens a block, for the target, half of the work, is run
# for a text once whatever is drafted from it. Half of the tokens teach as much so (docs/dev/block_heads.md).
set -euo pipefail
RUN=$1 PROMPTS=$2
MODEL=${MODEL:-smollm2}
GPUS=${GPUS:-1}           # 0: a CPU, for a try
ENGINES=${ENGINES:-12}    # of a GPU, side by side: one is bound by launches, not by the GPU
OWN=${OWN:-24000}         # prompts that the model is asked to write itself
ANSWERS=${ANSWERS:-2}     # to each prompt; the first ones are greedy but for a fifth
ANSWERING=${ANSWERING:-0} # seconds that they may take, 0: as many as they do; what is there then is trained on
MINUTES=${MINUTES:-18}    # of training
TOKENS=${TOKENS:-16384}   # of one step of a GPU
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
generate() {
  local code=0
  timeout --signal KILL "$ANSWERING" $DRAFTWING train generate --out "$RUN/head" "${DATA[@]}" $OPTIONS || code=$?
  [ $code = 0 ] || { [ $code = 137 ] && [ "$ANSWERING" != 0 ]; } # else something else killed it, such as a lack of memory
}

case $FIRST in own) [ "$OWN" = 0 ] || each own ;; esac
shopt -s nullglob
# In the order in which they are answered, while there is time: first answers to all before second ones.
DATA=(--prompts "$RUN"/own-*.jsonl "$PROMPTS" --eval-prompts "$EVAL" --answers "$ANSWERS" --max-tokens 256
  --greedy-share 0.8 --temperatures 0.3 1.0 --model "$MODEL"
  --algorithm DSPARK --online --draft-layers 3 --ffn-size 1280 --markov-rank 64 --draft-vocab-size 16384 --anchors 1
  --draft-lm-head target --block-loss lk_hybrid --optimizer muon --lr 0.008 --batch-tokens "$TOKENS")
case $FIRST in own | generate) each generate ;; esac
case $FIRST in
own | generate | fit)
  $DRAFTWING train fit --out "$RUN/head" "${DATA[@]}" --minutes "$MINUTES" --eval-every 2000 \
    --gpus $((GPUS > 1 ? GPUS : 1))
  ;;
esac
$DRAFTWING train eval --out "$RUN/head" "${DATA[@]}"
