"""The launchers run, as far as they can without a cluster: SLURM's script, the JobSet, local processes."""

import os
import subprocess

import pytest
import yaml
from launchers import checkout, path_with_python, sbatch
from processes import PATIENCE_SECONDS, environment, small_run
from several_processes import free_port

TRAIN = ["train", "config=own.yml"]
RL = ["train_rl", "config=own_rl.yml"]
RL_KEYS = {"rl_task": "format", "num_generations": "4", "accumulation": "streamed"}
RL_KEYS |= {"max_prefill_predict_length": "8"}


@pytest.fixture
def own(tmp_path):
  """A checkout with configurations of one's own, which say where their runs go."""
  run = small_run(tmp_path / "results", tmp_path / "words.txt", tmp_path / "cache")
  keys = dict(key.split("=", 1) for key in run)
  # A file that was tried on a laptop has simulated devices.
  keys |= {"base_config": keys.pop("config"), "run_name": "own", "num_simulated_devices": "8"}
  with_task = {key: value for key, value in keys.items() if "dataset" not in key} | RL_KEYS
  for name, each in {"own.yml": keys, "own_rl.yml": with_task}.items():
    (tmp_path / name).write_text("".join(f"{key}: {value}\n" for key, value in each.items()))
  return checkout(tmp_path)


def test_sbatch_trains_a_file_of_ones_own(own):
  done = sbatch(own, TRAIN[1], "steps=2")
  assert (done.returncode, done.stderr) == (0, "")
  # A device of each task, and no simulated ones.
  assert done.stdout.count(" 2 devices = data 2 ") == 1
  assert (own / "results" / "own" / "metrics.jsonl").exists()
  assert not (own / "runs").exists()


@pytest.mark.parametrize(
  ("words", "shown"),
  [(RL, "num_generations 4"), (["dataset_type=synthetic"], "400 steps")],
  ids=["train_rl", "no file"],
)
def test_sbatch_checks_what_any_command_would_do(own, words, shown):
  done = sbatch(own, *words, "validate_only=true")
  assert (done.returncode, done.stderr) == (0, "")
  assert shown in done.stdout


def test_a_command_that_is_none_is_refused(own):
  done = sbatch(own, "trian", TRAIN[1])
  said = "error: trian: there is no such command; for example train_rl\n"
  assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_the_sbatch_script_asks_slurm_in_lines_that_it_reads(own):
  # SLURM stops reading at the first command.
  lines = (own / "scripts" / "train.sbatch").read_text().splitlines()
  first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
  options = [line for line in lines if line.startswith("#SBATCH ")]
  assert options == [line for line in lines[:first] if line.startswith("#SBATCH --")]
  assert "#SBATCH --signal=TERM@120" in options


@pytest.mark.parametrize("words", [TRAIN[1:], RL], ids=["train", "train_rl"])
def test_local_processes_check_a_run_together(own, words):
  keys = [*words, "num_simulated_devices=2", "validate_only=true"]
  done = subprocess.run(
    [own / "scripts" / "local_cluster.sh", "2", *keys],
    capture_output=True,
    text=True,
    timeout=PATIENCE_SECONDS,
    env=environment(),
  )
  assert (done.returncode, done.stderr) == (0, "")
  assert done.stdout.count("ok   batch plan") == 1
  assert "on 2 × CPU, simulated" in done.stdout
  assert ("num_generations 4" in done.stdout) == (words == RL)
  assert not (own / "results").exists()


@pytest.mark.parametrize("words", [TRAIN, RL], ids=["train", "train_rl"])
def test_the_pods_of_the_jobset_run_their_command(own, words):
  jobset = yaml.safe_load((own / "scripts" / "jobset.yaml").read_text())
  (job,) = jobset["spec"]["replicatedJobs"]
  spec = job["template"]["spec"]
  assert spec["parallelism"] == spec["completions"] == 2
  (container,) = spec["template"]["spec"]["containers"]
  variables = {one["name"]: one["value"] for one in container["env"]}
  name = jobset["metadata"]["name"]
  # Names of pods and the volume are a cluster's.
  assert variables["JAX_COORDINATOR_ADDRESS"] == f"{name}-{job['name']}-0-0.{name}:1234"
  variables["JAX_COORDINATOR_ADDRESS"] = f"localhost:{free_port()}"
  (volume,) = container["volumeMounts"]
  arguments = [one.replace(volume["mountPath"], str(own / "volume")) for one in container["args"]]
  # What the comments say to change: the command, the file, and for a built-in task the tokens.
  assert (container["command"], arguments[0]) == (["python", "-m", "maxbatch.train"], "config=base")
  if words == RL:
    arguments.remove(f"dataset_cache_directory={own}/volume/tokens")
  line = ["python", "-m", f"maxbatch.{words[0]}", words[1], *arguments[1:]]
  # Once: a shell that reads its script while it is written again finds it empty, and ends with 0.
  path = path_with_python(own)
  pods = [
    subprocess.Popen(
      [*line, "validate_only=true"],
      cwd=own,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=environment(
        **variables,
        PATH=path,
        KUBERNETES_SERVICE_HOST="10.0.0.1",
        JOB_COMPLETION_INDEX=str(number),
      ),
    )
    for number in range(2)
  ]
  (first, errors), other = [pod.communicate(timeout=PATIENCE_SECONDS) for pod in pods]
  assert ([pod.returncode for pod in pods], errors, other) == ([0, 0], "", ("", ""))
  assert f"{os.sep}volume{os.sep}runs" in first
  assert "on 2 × CPU" in first
  assert ("num_generations 4" in first) == (words == RL)
