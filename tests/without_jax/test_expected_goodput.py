"""Goodput where hosts fail: formulas against a search, and the simulation against one host by one."""

import dataclasses
import heapq
import json
import math
import random

import pytest
from written_runs import write_run

from maxbatch.estimate.failures import Recovery, best_interval, daly, goodput, simulate, young
from maxbatch.plan import main

HOUR = 3600.0


@pytest.mark.parametrize("mtbf", [30.0, 600.0, 1e5])
@pytest.mark.parametrize("save", [0.1, 20.0, 100.0])
def test_no_interval_is_better_than_the_best(save, mtbf):
  recovery, best = Recovery(save, 60.0), best_interval(save, mtbf)
  highest = goodput(best, recovery, mtbf)
  others = [best * factor for factor in (0.1, 0.5, 0.9, 0.99, 1.01, 1.1, 2, 10)]
  assert highest > max(goodput(each, recovery, mtbf) for each in others)
  assert goodput(daly(save, mtbf), recovery, mtbf) > 0.97 * highest


def test_young_and_daly_are_their_formulas():
  # Daly 2006: save 5 minutes, a failure every 24 hours.
  assert young(5 * 60, 24 * HOUR) == pytest.approx(60 * 120)
  ratio = 5 / (2 * 24 * 60)
  expected = 120 * (1 + math.sqrt(ratio) / 3 + ratio / 9) - 5
  assert daly(5 * 60, 24 * HOUR) == pytest.approx(60 * expected)
  assert daly(100.0, 50.0) == 50.0
  assert daly(1e-6, 1e9) == pytest.approx(young(1e-6, 1e9), rel=1e-6)


@pytest.mark.parametrize(("num_hosts", "interval"), [(10, 9000.0), (1000, 900.0), (10_000, 60.0)])
def test_the_simulation_agrees_with_the_formula(num_hosts, interval):
  host, recovery = 6000 * HOUR, Recovery(20.0, 300.0)
  expected = goodput(interval, recovery, host / num_hosts)
  result = simulate(num_hosts, host, recovery, interval)
  assert 1 - result == pytest.approx(1 - expected, rel=0.05)
  assert result == simulate(num_hosts, host, recovery, interval)
  assert result != simulate(num_hosts, host, recovery, interval, seed=1)


def one_by_one(
  num_hosts: int, mtbf: float, storage: Recovery, saves: float, memory: Recovery, copies: float
) -> float:
  """The same with a clock for each host, which trains, copies and saves interval by interval."""
  rng = random.Random(7)
  failures = [(rng.expovariate(1 / mtbf), host) for host in range(num_hosts)]
  heapq.heapify(failures)
  now, end, trained, since_save = 0.0, 4000 * mtbf / num_hosts, 0.0, 0.0

  def works(seconds: float) -> bool:
    """Lets time pass unless a host fails before; whether it did."""
    nonlocal now
    if now + seconds < failures[0][0]:
      now += seconds
      return True
    now = failures[0][0]
    return False

  def fails() -> int:
    _, host = heapq.heappop(failures)
    heapq.heappush(failures, (now + rng.expovariate(1 / mtbf), host))
    return host

  while now < end:
    if works(copies + memory.save_seconds):
      trained, since_save = trained + copies, since_save + copies
      if since_save < saves - 1e-9:
        continue
      if works(storage.save_seconds):
        since_save = 0.0
        continue
    down, from_storage = [fails()], False
    while not works(storage.restart_seconds if from_storage else memory.restart_seconds):
      host = fails()
      from_storage |= any((host - other) % num_hosts in (1, num_hosts - 1) for other in down)
      down.append(host)
    if from_storage:
      trained, since_save = trained - since_save, 0.0
  return trained / now


@pytest.mark.parametrize(("mtbf", "restart"), [(3000.0, 30.0), (600.0, 30.0), (600.0, 80.0)])
def test_the_simulation_agrees_with_hosts_that_fail_one_by_one(mtbf, restart):
  storage, memory = Recovery(3.0, 3 * restart), Recovery(1.0, restart)
  given = (6, mtbf, storage, 100.0, memory, 10.0)
  result = simulate(*given)
  assert 1 - result == pytest.approx(1 - one_by_one(*given), rel=0.06)
  assert result > simulate(*given[:4])
  assert result < simulate(*given, during_restarts=False)
  # Two that always fail at once leave storage alone, and what copies cost.
  num_hosts, mtbf, storage, saves, memory, copies = given
  free = dataclasses.replace(memory, save_seconds=0.0)
  both = simulate(num_hosts, mtbf, storage, saves, free, copies, storage_share=1.0)
  assert 1 - both == pytest.approx(1 - simulate(*given[:4]), rel=0.06)


def printed(capsys: pytest.CaptureFixture[str], *keys: str) -> str:
  assert main(["config=base", *keys]) == 0
  return capsys.readouterr().out.partition("Goodput\n")[2]


TIMES = ["mtbf=6334", "step_seconds=4", "save_seconds=20", "restart_seconds=200"]
TIMES += ["compile_seconds=100", "copy_seconds=0.5", "copy_restart_seconds=60"]


def test_the_plan_says_what_to_expect(capsys):
  said = printed(capsys, *TIMES)
  assert max(map(len, said.splitlines())) <= 80
  assert "1,000  6.33 hours    235    239    235   94.62%" in said
  assert main(["config=base", *TIMES, "--json"]) == 0
  result = json.loads(capsys.readouterr().out)["goodput"]
  best = {one["num_hosts"]: one for one in result["from_storage"]}
  from_memory = {one["num_hosts"]: one for one in result["from_memory"]}
  assert list(best) == [1, 10, 100, 1000, 10_000]
  assert list(from_memory) == [10, 100, 1000, 10_000]
  for one in [*best.values(), *from_memory.values()]:
    assert 1 - one["simulated"] == pytest.approx(1 - one["goodput"], rel=0.08)
    assert one["best"] % 4 == 0
  assert all(from_memory[n]["goodput"] > best[n]["goodput"] for n in from_memory)
  assert best[1000]["at_period"] < best[1000]["goodput"]


def test_a_run_says_how_long_it_takes(tmp_path, capsys):
  folder = write_run(tmp_path / "run")
  events = [
    {"event": "start", "time": 102.0, "began": 100.0, "step": 0},
    {"event": "compiled", "time": 110.0, "seconds": 6.0},
    *({"event": "saved", "time": 111.0 + n, "seconds": n} for n in (0.5, 0.7, 9.0)),
    {"event": "copied", "time": 121.0, "seconds": 0.25},
    {"event": "start", "time": 145.0, "began": 140.0, "last_seen": 130.0, "step": 0},
    {"event": "compiled", "time": 149.0, "seconds": 1.0},
  ]
  (folder / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in events))
  main(["config=base", "mtbf=100", f"from_run={folder}", "compile_seconds=2", "--json"])
  result = json.loads(capsys.readouterr().out)["goodput"]
  # Between the starts 10 s; before they compile 4 and 8.
  assert result["storage"] == {"save_seconds": 0.7, "restart_seconds": 16 + 2}
  assert result["memory"] == {"save_seconds": 0.25, "restart_seconds": 18}
  assert result["times"]["step_seconds"] == 0.5


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    (["save_seconds=3"], "save_seconds=3 says what failures cost, and counts with mtbf"),
    (["from_run=x"], "from_run=x says what failures cost, and counts with mtbf"),
    (
      ["mtbf=9"],
      "mtbf needs save_seconds, and no run is named; give it, for example save_seconds=",
    ),
    (["mtbf=9", "save_seconds=3"], "mtbf needs restart_seconds, and no run is named"),
    (["mtbf=9", "from_run=nowhere"], "from_run=nowhere: there is no run with a metrics.jsonl"),
  ],
)
def test_what_is_missing_is_said(capsys, keys, said):
  assert main(["config=base", *keys]) == 2
  assert capsys.readouterr().err.startswith(f"error: {said}")


def test_every_time_changes_the_answer(capsys):
  usual = printed(capsys, *TIMES)
  for time in TIMES:
    name, _, value = time.partition("=")
    changed = [f"{name}={2 * float(value)}" if each == time else each for each in TIMES]
    assert printed(capsys, *changed) != usual, name
