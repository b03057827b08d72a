"""Folders of runs, written without training."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.config.load import load_config, to_flat_dict

HOSTILE = (
  "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;$$x$$\u202e\x1b[31m\x00"
)


def write_run(
  folder: Path, steps: int = 40, *keys: str, loss: float = 2.0, text: str = "", ended: bool = True
) -> Path:
  """A run of so many steps that was stopped once, in whose words `text` is everywhere."""
  config = load_config(["config=base", f"steps={steps}", "num_simulated_devices=8", *keys])
  plan = plan_batches(config.batch, config.run, topology(config.mesh, 8))
  flat = to_flat_dict(config)
  # YAML has no control characters.
  content = {**flat, "prompt": text.partition("\u202e")[0], "derived": plan.as_dict()}
  (folder / "starts").mkdir(parents=True)
  (folder / "checkpoints" / "20").mkdir(parents=True)
  (folder / "config.yml").write_text(yaml.safe_dump(content, sort_keys=False))
  for number, rate in ((1, 0.003), (2, 0.001)):
    start = yaml.safe_dump(content | {"learning_rate": rate}, sort_keys=False)
    (folder / "starts" / f"{number}.yml").write_text(start)
  _write_lines(folder / "metrics.jsonl", [_record(step, steps, loss) for step in range(steps + 1)])
  _write_lines(folder / "events.jsonl", _events(steps, text, ended=ended))
  return folder


def _record(step: int, steps: int, loss: float) -> Mapping[str, float]:
  record: dict[str, float] = {"step": step, "samples": 32 * step, "tokens": 32 * 128 * step}
  now = loss + 3.5 * math.exp(-3 * step / steps)
  if step:
    record |= {"loss": now + 0.1 * math.sin(step), "grad_norm": 1.5, "learning_rate": 3e-3}
    record |= {"global_batch_to_train": 32, "micro_batch_to_train": 32}
    record |= {"gradient_accumulation_steps": 1, "step_seconds": 0.5, "data_wait_seconds": 0.01}
    record |= {"tokens_per_second": 8192.0, "gns/total": 90.0, "gns/total_low": 60.0}
    record |= {"gns/total_high": 150.0, "accuracy": 0.5}
  if step % (steps // 4) == 0:
    record["eval/loss"] = now
  return record


def _events(steps: int, text: str, *, ended: bool) -> Sequence[Mapping[str, Any]]:
  start = {"event": "start", "time": 1.7e9, "step": 0, "host": "elsewhere", "process": 7}
  start |= {"command": ["python", "-m", "maxbatch.train", "config=base", f"prompt={text}"]}
  start |= {"devices": "8 × CPU, simulated", "about": f"Model  default {text}", "versions": "jax 1"}
  return [
    start,
    {"event": "compiled", "time": 1.7e9, "seconds": 3.0},
    {"event": "text", "time": 1.7e9, "step": 0, "text": f"def nothing {text}"},
    {"event": "saved", "time": 1.7e9, "step": 20, "seconds": 0.5},
    {"event": "verified", "time": 1.7e9, "step": 20},
    {"event": "notice", "time": 1.7e9, "text": f"warning: the disk is full {text}"},
    {"event": "end", "time": 1.7e9, "how": "stopped", "step": 20, "text": ""},
    start | {"step": 20, "time": 1.7e9 + 60},
    {"event": "evaluated", "time": 1.7e9, "step": steps, "seconds": 2.0, "host_peak_bytes": 2**30},
    {"event": "text", "time": 1.7e9 + 90, "step": steps, "text": "def forward(self):", "seconds": 1.0},
    *([{"event": "end", "time": 1.7e9 + 90, "how": "finished", "step": steps}] if ended else []),
  ]  # fmt: skip


def _write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
  path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
