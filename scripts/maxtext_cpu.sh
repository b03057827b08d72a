#!/usr/bin/env bash
# Runs MaxText 0.2.5 on simulated CPU devices with the shapes of scripts/benchmark.py, as its peer:
#
#   python -m venv PEER && PEER/bin/pip install "maxtext[tpu]==0.2.5"     (Python 3.12)
#   python scripts/benchmark.py --tables runs --peer \
#     "scripts/maxtext_cpu.sh PEER {devices} {per_device} {accumulation} {steps} {cache} [key=value ...]"
#
# With huge pages, layers unrolled, and remat minimal, the fastest of its policies that we found.
set -euo pipefail
: "${6:?arguments: PEER DEVICES PER_DEVICE ACCUMULATION STEPS CACHE [key=value ...]}"
peer=$1 devices=$2 per_device=$3 accumulation=$4 steps=$5 cache=$6
shift 6
base=$("$peer/bin/python" -c "import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec('maxtext').origin).parent / 'configs/base.yml')")
output=$(mktemp -d)
trap 'rm -rf "$output"' EXIT
export JAX_PLATFORMS=cpu XLA_FLAGS="--xla_force_host_platform_device_count=$devices"
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1
"$peer/bin/python" -m maxtext.trainers.pre_train.train "$base" \
  run_name=peer base_output_directory="$output" jax_cache_dir="$cache" dataset_type=synthetic hardware=cpu \
  attention=dot_product enable_checkpointing=false enable_goodput_recording=false \
  skip_jax_distributed_system=true dtype=float32 weight_dtype=float32 scan_layers=false remat_policy=minimal \
  base_num_decoder_layers=6 base_emb_dim=256 base_mlp_dim=1024 base_num_query_heads=8 base_num_kv_heads=8 \
  head_dim=32 max_target_length=256 vocab_size=260 ici_data_parallelism=-1 ici_fsdp_parallelism=1 \
  per_device_batch_size="$per_device" gradient_accumulation_steps="$accumulation" steps="$steps" "$@"
