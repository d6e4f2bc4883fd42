#!/usr/bin/env bash
# SHA-256 of every file that a build of quantkit makes of the built-in demo model: each method and format at 2, 3, 4 and 8
# bits, each GGUF type with and without importance and error feedback, and the JSON of measurements without times.
# Two builds are the same to users where the lists of both, made on one machine, are equal:
#
#   reference/record_artifacts.sh target/debug/quantkit > new.txt && diff old.txt new.txt
set -euo pipefail
binary=$(realpath "${1:?usage: record_artifacts.sh BINARY}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export QUANTKIT_DEVICE=cpu
unset QUANTKIT_THREADS || true

calibration=(--nsamples 8 --seqlen 128)

# NAME OPTIONS...: one artifact, all its files.
folder() {
    local name=$1
    shift
    if "$binary" "$@" --no-eval -q -o "$name" >/dev/null 2>"$name.log"; then
        find "$name" -type f | sort | xargs sha256sum
    else
        echo "refused $name: $(tail -n 1 "$name.log")"
    fi
    rm -rf "$name" "$name.log"
}

gguf() {
    local name=$1
    shift
    if "$binary" gguf -q --no-eval "$@" -o "$name.gguf" >/dev/null 2>"$name.log"; then
        sha256sum "$name"*.gguf
    else
        echo "refused $name: $(tail -n 1 "$name.log")"
    fi
    rm -f "$name"*.gguf "$name.log"
}

# OPTIONS...: the object that a measurement prints, without its times.
measured() {
    echo "$("$binary" "$@" --json -q 2>/dev/null | grep -v -E '"(seconds|.*_seconds|tokens_per_second|peak_rss_bytes|measured_speedup)"' | sha256sum) $*"
}

for bits in 2 3 4 8; do
    for format in gptq awq compressed-tensors; do
        for sym in "" --asym; do
            folder "gptq-$bits-$format$sym" gptq --bits "$bits" --group-size 64 --format "$format" $sym "${calibration[@]}"
            folder "rtn-$bits-$format$sym" rtn --bits "$bits" --group-size 64 --format "$format" $sym
        done
        for sym in "" --sym; do
            folder "awq-$bits-$format$sym" awq --bits "$bits" --group-size 64 --format "$format" $sym "${calibration[@]}"
        done
    done
    folder "gptq-$bits-channel" gptq --bits "$bits" --group-size -1 "${calibration[@]}"
    folder "gptq-$bits-order" gptq --bits "$bits" --group-size 64 --desc-act "${calibration[@]}"
    folder "gptq-$bits-static" gptq --bits "$bits" --group-size 64 --desc-act --static-groups "${calibration[@]}"
    folder "gptq-$bits-drift" gptq --bits "$bits" --group-size 64 --drift-correction --sweeps 3 "${calibration[@]}"
    folder "gptq-$bits-v2" gptq --bits "$bits" --group-size 64 --checkpoint-format gptq_v2 "${calibration[@]}"
done
folder rule gptq --group-size 64 --rule '.*mlp.*=bits:8' --skip '.*k_proj' --grid mse --order natural "${calibration[@]}"
folder awq-gptq awq --group-size 64 --rounding gptq "${calibration[@]}"
for more in "" --static-activations "--kv-cache fp8" "--kv-cache fp8-per-head" "--rounding gptq" "--alpha 0.5"; do
    folder "smoothquant${more// /-}" smoothquant $more "${calibration[@]}"
done
for weights in tensor channel block; do
    for format in fp8 compressed-tensors; do
        folder "fp8-$weights-$format" fp8 --weights "$weights" --format "$format"
        folder "fp8-$weights-$format-gptq" fp8 --weights "$weights" --format "$format" --rounding gptq "${calibration[@]}"
    done
done
folder fp8-static fp8 --weights tensor --static-activations --kv-cache fp8 "${calibration[@]}"

types=(F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K
    IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ2_M IQ3_XXS IQ3_XS IQ3_S IQ3_M IQ4_NL IQ4_XS TQ1_0 TQ2_0 MXFP4 MXFP4_MOE)
"$binary" imatrix --chunks 2 -q -o importance.gguf >/dev/null 2>&1
sha256sum importance.gguf
for type in "${types[@]}"; do
    gguf "$type" --type "$type"
    gguf "$type-importance" --type "$type" --imatrix importance.gguf
    gguf "$type-feedback" --type "$type" --error-feedback --chunks 1
done
gguf split --type Q4_K_M --split-max-size 1M --tensor-type 'attn_v=Q8_0'

"$binary" gptq --group-size 64 "${calibration[@]}" --no-eval -q -o w4 >/dev/null 2>&1
"$binary" gguf --type Q4_K_M --no-eval -q -o w4.gguf >/dev/null 2>&1
for model in w4 w4.gguf; do
    measured eval ppl "$model" --max-windows 4
    measured eval kl "$model" --max-windows 4
    measured eval kv "$model" --max-windows 2
    measured inspect "$model" --verify
    measured plan "$model"
done
"$binary" generate w4 --prompt "It was" --max-tokens 32 -q 2>/dev/null | sha256sum
"$binary" generate w4 --prompt "It was" --max-tokens 32 --temperature 0.8 --seed 3 -q 2>/dev/null | sha256sum
