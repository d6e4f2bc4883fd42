#!/usr/bin/env bash
# Everything that only a GPU can tell, in one call of under ten minutes: the CUDA tests on the real device, the
# machine's ceilings and what the engine reaches of them, and GPTQ of a 7B-shaped model. Needs Rust, Python with
# numpy, and an NVIDIA driver. Writes the results to the folder given, by default reference/gpu/CARD-DATE.
#
#     reference/gpu/bench.sh [FOLDER]
#
# LAYERS=8 makes a smaller model; BIN and TESTS name programs that were built before.
set -euo pipefail
cd "$(dirname "$0")/../.."

card=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1)
out=${1:-reference/gpu/$(echo "$card" | tr -c 'A-Za-z0-9\n' '-')-$(date +%F)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
layers=${LAYERS:-32}

echo "card: $card, driver $driver, $(date -u +%F)" | tee "$out/machine.txt"
python3 reference/gpu/make_model.py "$work/model" --layers "$layers" &
model=$!

if [[ -z ${BIN:-} ]]; then
    cargo build --release --locked --bins --benches
    BIN=target/release/quantkit
fi
bench=${BENCH:-$(ls -t target/release/deps/gpu-* 2>/dev/null | grep -v '\.d$' | head -1)}

# The same suite as on the emulator, one test at a time: they share one card.
if [[ -n ${TESTS:-} ]]; then
    QUANTKIT_TEST_GPU=1 "$TESTS" cuda:: --test-threads 1 2>&1 | tee "$out/tests.txt" | tail -15 || true
else
    QUANTKIT_TEST_GPU=1 cargo test --locked --test it cuda:: -- --test-threads 1 2>&1 | tee "$out/tests.txt" | tail -15 || true
fi

wait "$model"
# 128 windows of 2048 tokens, as the target is worded; the program tells its own times and memory.
"$BIN" gptq "$work/model" --device cuda:0 --bits 4 --group-size 128 --sampling random \
    --nsamples 128 --seqlen 2048 --calib calib/calibration.txt --no-eval --json -o "$work/w4" \
    >"$out/gptq.json" 2> >(tee "$out/gptq.txt" >&2)
tail -30 "$out/gptq.txt"
"$bench" "$work/w4" "$work/model" | tee "$out/bench.json"

if command -v compute-sanitizer >/dev/null; then
    compute-sanitizer --tool memcheck "$BIN" generate --device cuda:0 --no-cuda-graph --prompt 'It was' \
        --max-tokens 4 2>&1 | tee "$out/sanitizer.txt" | tail -3
fi
