#!/usr/bin/env bash
# All that is to be checked and timed on one GPU, in calls of less than ten minutes each.
#
#   benchmarks/gpu/all.sh prepare [PEER]   where there is a network: what the other calls need, into .gpu-deps (PEER: the peer's script;
#                                          TARGET: the version of the GPU machine's Python, if it is another one)
#   benchmarks/gpu/all.sh check            build, operations, models beside transformers, determinism
#   benchmarks/gpu/all.sh curves           loss curves
#   benchmarks/gpu/all.sh small            0.6B and smaller models beside the peer, profiles, the GRPO step
#   benchmarks/gpu/all.sh large            8B beside the peer: recomputed and not
#   benchmarks/gpu/all.sh ops              each operation, before and after, for 0.6B and 8B; sanitizers
#
# All but the first build what is not built. Lines of JSON go to $OUT/results.jsonl (OUT: build/gpu/results if not set), all
# output to $OUT/logs-CALL.tar.gz. A step that fails or runs out of its time is named at the end and does not stop the others; STEPS="a b" runs
# only those of a call.
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-$PWD/build/gpu/results}
BUILD=${BUILD:-build/gpu}
LOGS=$PWD/$BUILD/logs
DEPS=$PWD/.gpu-deps
export OUT PYTHON BUILD RESULTS=$LOGS PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
lines=$OUT/results.jsonl
failed=()

if [ "${1:-}" = prepare ]; then
    benchmarks/gpu/build_and_test.sh prepare
    # shellcheck disable=SC2086
    $PYTHON -m pip download -q --no-deps --only-binary=:all: ${TARGET:+--python-version $TARGET} -d "$DEPS/wheels" pybind11 liger-kernel peft \
        pydantic pydantic-core annotated-types typing-inspection
    [ -z "${2:-}" ] || cp "$2" "$DEPS/peer_script.py"
    du -sh "$DEPS"
    exit
fi

mkdir -p "$OUT" && rm -rf "$LOGS" && mkdir -p "$LOGS"
trap 'tar -czf "$OUT/logs-${1:-none}.tar.gz" -C "$LOGS" .' EXIT

# step NAME SECONDS COMMAND...: its lines that begin with a brace are results; the whole output goes to a file of its own.
step() {
    local name=$1 limit=$2 begun=$SECONDS status=0
    shift 2
    [ -z "${STEPS:-}" ] || [[ " $STEPS " == *" $name "* ]] || return 0
    echo "== $name ($(date +%T))"
    timeout -k 10 "$limit" "$@" > "$LOGS/$name.log" 2>&1 || status=$?
    grep -h '^{' "$LOGS/$name.log" | sed "s/^{/{\"step\": \"$name\", /" >> "$lines"
    grep -h '^{' "$LOGS/$name.log" | cut -c1-420
    grep -hE 'FAILED|TOO LARGE|OUTSIDE|Error' "$LOGS/$name.log" | head -20
    [ $status = 0 ] || failed+=("$name ($status)")
    echo "-- $name: status $status, $((SECONDS - begun)) s"
}
train() { step "$1" "$2" $PYTHON benchmarks/gpu/train.py "${@:3}"; }
peer() {
    [ -e "$DEPS/peer_script.py" ] || return 0
    step "$1" "$2" $PYTHON benchmarks/gpu/peer.py "$DEPS/peer_script.py" "${@:3}"
}

# What was carried along becomes importable; the build is kept while the machine is.
for wheel in "$DEPS"/wheels/*.whl; do
    done_file=$BUILD/site/$(basename "$wheel").done
    [ -e "$wheel" ] && [ ! -e "$done_file" ] || continue
    mkdir -p "$BUILD/site" && $PYTHON -m zipfile -e "$wheel" "$BUILD/site" && touch "$done_file"
done
export PYTHONPATH=$PWD:$PWD/$BUILD/site${PYTHONPATH:+:$PYTHONPATH}
nvidia-smi --query-gpu=name,driver_version,clocks.sm,temperature.gpu,power.draw --format=csv,noheader 2> /dev/null | tee -a "$LOGS/gpu.txt"
# Built once for each state of the sources, whatever times their files bear.
state=$(find csrc cmake CMakeLists.txt -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum)
if [ "$(cat "$BUILD/built" 2> /dev/null)" != "$state" ]; then
    STEPS='' step build 480 benchmarks/gpu/build_and_test.sh build
    if [ ${#failed[@]} != 0 ]; then
        tail -n 40 "$LOGS/build.log"
        exit 1
    fi
    echo "$state" > "$BUILD/built"
fi

case "${1:-}" in
check)
    step tests 200 "$BUILD/surogate_cuda_tests"
    grep -E '^FAILED|tests,' "$LOGS/tests.log"
    step models 120 $PYTHON -m pytest -q -s tests/gpu/test_models.py -m gpu -p no:cacheprovider
    grep -E 'ratio|passed|failed' "$LOGS/models.log"
    step determinism 200 $PYTHON benchmarks/gpu/determinism.py 12
    ;;
curves)
    step loss_curve 400 $PYTHON benchmarks/gpu/loss_curve.py --torch
    ;;
small)
    # The peer, we, the peer again: a card that has warmed up must not count for one side alone.
    peer peer_0.6B 60 0.6B,full,0,0,16,2048,1
    train full_0.6B 90 0.6B,full,0,16,bfloat16,float32 0.6B,full,0,16,bfloat16,bfloat16
    peer peer_0.6B_again 90 0.6B,full,0,0,16,2048,1 0.6B,full,0,0,32,2048,1
    train full_0.6B_32 60 0.6B,full,0,32,bfloat16,bfloat16
    train profile_0.6B 60 --profile 0.6B,full,0,16,bfloat16,bfloat16
    tail -n 60 "$LOGS/profile_0.6B.log"
    train lora_0.6B 60 0.6B,lora,0,32
    peer peer_lora_0.6B 60 0.6B,lora,0,0,32,2048,1
    step grpo 90 $PYTHON benchmarks/gpu/grpo_step.py full lora
    train llmq_sizes 150 0.5B,full,0,16,bfloat16,bfloat16 1.5B,full,0,16,bfloat16,bfloat16 7B,full,0,8,bfloat16,bfloat16
    ;;
large)
    peer peer_8B_recomputed 70 8B,full,1,0,8,2048,1
    train full_8B_recomputed 110 8B,full,1,8,bfloat16,bfloat16,lend
    train full_8B 110 8B,full,0,8,bfloat16,bfloat16
    peer peer_8B 110 8B,full,0,0,4,2048,1 8B,full,0,0,8,2048,1
    train profile_8B 110 --profile 8B,full,1,8,bfloat16,bfloat16,lend
    tail -n 60 "$LOGS/profile_8B.log"
    ;;
ops)
    step bench_0.6B 170 "$BUILD/surogate_cuda_bench" 0.6B optimizer --jsonl "$lines"
    cat "$LOGS/bench_0.6B.log"
    step bench_8B 200 "$BUILD/surogate_cuda_bench" 8B --jsonl "$lines"
    cat "$LOGS/bench_8B.log"
    step attention_kernels 60 ncu --clock-control none --metrics gpu__time_duration.sum "$BUILD/surogate_cuda_bench" attention
    grep -E '\(.*Context|gpu__time_duration' "$LOGS/attention_kernels.log" | paste - - | sed -E 's/ +/ /g' | cut -c1-160 | head -60
    step sanitize 200 benchmarks/gpu/build_and_test.sh sanitize
    tail -n 8 "$LOGS/sanitize.log"
    ;;
*)
    echo "usage: $0 prepare|check|curves|small|large|ops" >&2
    exit 2
    ;;
esac
echo "failed: ${failed[*]:-none}"
[ ${#failed[@]} = 0 ]
