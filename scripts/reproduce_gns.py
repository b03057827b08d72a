"""Measures the gradient noise scale of a small character model as Gray et al. (2024) did.

    .venv/bin/python scripts/reproduce_gns.py text=shakespeare.txt size=small out=gns

They train GPT-2 on tinyshakespeare and find that the noise scale of the normalization layers alone
follows that of the whole model, up to a factor. `size=full` is their configuration, for a GPU;
`small` takes minutes on a laptop. Without `text` the default text is taken. Writes gns.html and
gns.json into `out`. Correlations are of smoothed curves, as published, and of detrended means over
disjoint windows, which neither smoothing nor a common trend can raise.
"""

import json
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from maxbatch.config.load import load_config
from maxbatch.modes.run import run
from maxbatch.plots.chart import Chart, Line, Panel
from maxbatch.plots.page import picture
from maxbatch.run_folder.metrics import read_metrics

GPT2 = """mlp_activation=gelu normalization=layernorm position_embedding=learned mlp_bias=true
attention_qkv_bias=true attention_out_bias=true remat_policy=none num_simulated_devices=1
gns=all gns_report_every=500 gns_window_steps=64 log_period=500 eval_interval=500 adam_b2=0.99
learning_rate=1e-3 learning_rate_final_fraction=0.1 generate_length=0
block_cross_document_attention=false"""
SIZES = {
  "small": """base_emb_dim=64 base_num_decoder_layers=4 base_num_query_heads=4 base_num_kv_heads=4
  head_dim=16 base_mlp_dim=256 max_target_length=64 batch_size=32 steps=2000 warmup_steps=100""",
  "full": """base_emb_dim=384 base_num_decoder_layers=6 base_num_query_heads=6 base_num_kv_heads=6
  head_dim=64 base_mlp_dim=1536 max_target_length=256 batch_size=64 steps=5000 warmup_steps=100
  dropout_rate=0.2""",
}
SMOOTHING, WINDOW = 0.95, 50


def smoothed(values_N: np.ndarray, smoothing: float = SMOOTHING) -> np.ndarray:
  """Exponential moving average with bias correction."""
  mean, weight, out = 0.0, 0.0, []
  for value in values_N:
    mean, weight = smoothing * mean + (1 - smoothing) * value, smoothing * weight + 1 - smoothing
    out.append(mean / weight)
  return np.array(out)


def detrended(values_N: np.ndarray) -> np.ndarray:
  """The values minus their least-squares line."""
  places = np.arange(len(values_N))
  return values_N - np.polyval(np.polyfit(places, values_N, 1), places)


def correlation(one_N: np.ndarray, other_N: np.ndarray) -> float:
  """Pearson's correlation coefficient."""
  return float(np.corrcoef(one_N, other_N)[0, 1])


def ratios(records: Sequence[dict], group: str) -> tuple[np.ndarray, np.ndarray]:
  """Noise scale of a group: ratio of smoothed averages per step, and of means over windows."""
  noise, signal = (
    np.array([record[f"gns/{group}/{kind}"] for record in records]) for kind in ("noise", "signal")
  )
  whole = len(noise) // WINDOW * WINDOW
  windows = [part[:whole].reshape(-1, WINDOW).mean(1) for part in (noise, signal)]
  return smoothed(noise) / smoothed(signal), windows[0] / windows[1]


def compare(records: Sequence[dict]) -> tuple[dict[str, float], list[Chart]]:
  """Figures and drawings of the normalization layers against the whole model."""
  tokens = [record["tokens"] for record in records]
  total, total_windows = ratios(records, "total")
  norm, norm_windows = ratios(records, "norm")
  after_warmup = slice(len(total) // 10, None)  # The first tenth is the warm-up's.
  known = (total_windows > 0) & (norm_windows > 0)
  known[: len(known) // 10] = False
  logs = [np.log(windows[known]) for windows in (norm_windows, total_windows)]
  figures = {
    "total": float(total[-1]),
    "norm": float(norm[-1]),
    "slope": float(np.polyfit(norm[after_warmup], total[after_warmup], 1)[0]),
    "ratio": float(np.exp(np.mean(logs[1] - logs[0]))),
    "correlation_smoothed": correlation(norm[after_warmup], total[after_warmup]),
    "correlation_windows": correlation(logs[0], logs[1]),
    "correlation_windows_detrended": correlation(detrended(logs[0]), detrended(logs[1])),
    "windows": int(known.sum()),
  }
  curves = {"whole model": total, "normalization layers": norm}
  high = float(np.quantile(np.concatenate([total, norm]), 0.99)) * 1.1
  by_type = {name: ratios(records, name)[0] for name in ("attention", "mlp", "embedding", "head")}
  pairs = sorted(zip(norm_windows[known], total_windows[known], strict=True))
  panels = [
    Panel("noise scale (samples)", _lines(tokens, curves), low=0, high=high),
    Panel("by type of layer (samples)", _lines(tokens, by_type), low=0, high=high),
  ]
  x, y = zip(*pairs, strict=True)
  window = Panel(
    f"noise scale of the whole model (samples), means of {WINDOW} steps",
    [Line("a window", [x], y, style="dots")],
    low=0,
  )
  return figures, [
    Chart("noise scale", ["tokens"], panels),
    Chart(
      "whole model over norms", ["noise scale of the normalization layers (samples)"], [window]
    ),
  ]


def _lines(tokens: Sequence[float], curves: dict[str, np.ndarray]) -> list[Line]:
  return [
    Line(name, [tokens], values.tolist(), color=place, dash=place)
    for place, (name, values) in enumerate(curves.items())
  ]


def main(arguments: Sequence[str]) -> None:
  """Trains, compares, draws."""
  given = dict(argument.split("=", 1) for argument in arguments)
  size, text = given.pop("size", "small"), given.pop("text", "stdlib")
  out = pathlib.Path(given.pop("out", "gns"))
  keys = [*GPT2.split(), *SIZES[size].split(), *(f"{key}={value}" for key, value in given.items())]
  place = [f"dataset_path={text}", f"base_output_directory={out}", f"run_name={size}"]
  run(load_config(["config=base", *place, *keys]))
  records = [record for record in read_metrics(out / size) if "gns/total/noise" in record]
  figures, charts = compare(records)
  (out / "gns.json").write_text(json.dumps(figures, indent=2) + "\n")
  title = f"Gradient noise scale, {size}, {pathlib.Path(text).stem}"
  (out / "gns.html").write_bytes(picture(title, charts))
  for name, value in figures.items():
    print(f"{name:>30}  {value:.4g}")
  print(f"Written: {out / 'gns.html'}, {out / 'gns.json'}")


if __name__ == "__main__":
  main(sys.argv[1:])
