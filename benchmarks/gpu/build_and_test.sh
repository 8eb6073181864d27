#!/usr/bin/env bash
# Builds the CUDA back-end on the machine with the GPU, runs its tests and measures its operations.
#
#   benchmarks/gpu/build_and_test.sh prepare                   where there is a network: headers and the BLAS into .gpu-deps
#   benchmarks/gpu/build_and_test.sh [STEP ...]                where the GPU is; without steps: build tests bench
#
# Steps: build     the tests, the bench and the Python module (put into surogate_rl/)
#        tests     every operation beside the CPU's
#        sanitize  the tests of our own kernels under compute-sanitizer: memory, then races
#        archs     compiles the back-end for all architectures; needs no GPU
#        bench     rates at the shapes of three models (MODELS="0.6B 8B optimizer" for some of them)
#
# Needs there: nvcc 12.8 or later, CMake, ninja, and cuBLAS and cuDNN 9 from the toolkit or from the packages of python3. Results (logs, and a
# line of JSON per operation) go to RESULTS, by default $OUT or build/gpu/results. PYTHON, JOBS, ARCHS and BUILD can be set too.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
BUILD=${BUILD:-build/gpu}
RESULTS=${RESULTS:-${OUT:-$BUILD/results}}
ARCHS=${ARCHS:-90a}
JOBS=${JOBS:-$(nproc)}
DEPS=.gpu-deps

if [ "${1:-}" = prepare ]; then
    mkdir -p $DEPS/wheels
    $PYTHON -m pip download -q --no-deps --only-binary=:all: -d $DEPS/wheels scipy-openblas32
    scratch=$(mktemp -d)
    $PYTHON -m pip install -q --no-deps --target "$scratch" nvidia-cudnn-frontend
    rm -rf $DEPS/include
    cp -r "$scratch/include" $DEPS/include
    rm -rf "$scratch"
    du -sh $DEPS
    exit
fi

steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(build tests bench)
mkdir -p "$RESULTS" "$BUILD"
# The wheels carried along become importable without being installed; what the interpreter has already is left alone.
site=$PWD/$BUILD/site
for wheel in $DEPS/wheels/*.whl; do
    [ -e "$wheel" ] && [ ! -e "$site/$(basename "$wheel").done" ] || continue
    mkdir -p "$site"
    $PYTHON -m zipfile -e "$wheel" "$site"
    touch "$site/$(basename "$wheel").done"
done
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}

failed=0
for step in "${steps[@]}"; do
    echo "== $step"
    case $step in
    build)
        frontend=()
        [ ! -e $DEPS/include/cudnn_frontend.h ] || frontend=("-DSUROGATE_CUDNN_FRONTEND=$PWD/$DEPS/include")
        cmake -S . -B "$BUILD" -G Ninja -DSUROGATE_CUDA=ON -DSUROGATE_TESTS=ON -DSUROGATE_PYTHON=ON "-DSUROGATE_CUDA_ARCHS=$ARCHS" \
            "-DPython_EXECUTABLE=$(command -v $PYTHON)" "${frontend[@]}"
        cmake --build "$BUILD" -j "$JOBS" --target surogate_cuda_tests surogate_cuda_bench _core
        cp "$BUILD"/_core*.so surogate_rl/
        ;;
    tests)
        "$BUILD/surogate_cuda_tests" > "$RESULTS/cuda_tests.log" 2>&1 || failed=1
        # All that failed, and the end: the log has every comparison.
        grep -E "TOO LARGE|OUTSIDE|FAILED" "$RESULTS/cuda_tests.log" || true
        tail -n 60 "$RESULTS/cuda_tests.log" | grep -E "^ok|tests," || tail -n 5 "$RESULTS/cuda_tests.log"
        ;;
    sanitize)
        for tool in memcheck racecheck; do
            echo "-- $tool"
            compute-sanitizer --tool $tool --error-exitcode 9 "$BUILD/surogate_cuda_tests" memory_copy rmsnorm_forward rmsnorm_with qk_norm swiglu \
                embedding_ linear_bias_backward memory_copies logprob_refuses adamw_float32 attention_plain_float32 sum_of > "$RESULTS/$tool.log" 2>&1 || failed=1
            tail -n 3 "$RESULTS/$tool.log"
        done
        ;;
    archs)
        frontend=()
        [ ! -e $DEPS/include/cudnn_frontend.h ] || frontend=("-DSUROGATE_CUDNN_FRONTEND=$PWD/$DEPS/include")
        cmake -S . -B "$BUILD-archs" -G Ninja -DSUROGATE_CUDA=ON -DSUROGATE_PYTHON=OFF "-DSUROGATE_CUDA_ARCHS=80;89;90a;100a;120a" \
            "-DPython_EXECUTABLE=$(command -v $PYTHON)" "${frontend[@]}"
        cmake --build "$BUILD-archs" -j "$JOBS" --target surogate_core || failed=1
        ;;
    bench)
        # shellcheck disable=SC2086
        "$BUILD/surogate_cuda_bench" ${MODELS:-} --jsonl "$RESULTS/cuda_ops.jsonl" 2>&1 | tee "$RESULTS/cuda_bench.log" || failed=1
        ;;
    *)
        echo "unknown step: $step (prepare, build, tests, sanitize, archs, bench)" >&2
        exit 2
        ;;
    esac
done
exit $failed
