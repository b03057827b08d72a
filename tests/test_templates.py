"""The templates for SLURM and Kubernetes: as far as they can be tried without a cluster."""

import re
import subprocess

import yaml
from processes import REPOSITORY

from maxbatch.config.load import load_config
from maxbatch.hardware.processes import StatedProcesses, stated_processes

SBATCH = REPOSITORY / "scripts" / "train.sbatch"
JOBSET = REPOSITORY / "scripts" / "jobset.yaml"
KEY = re.compile(r"(?<=\s)[a-z_]+=[^\s\"]+")


def test_the_sbatch_script_is_bash_and_its_keys_exist():
  done = subprocess.run(["bash", "-n", SBATCH], capture_output=True, text=True, check=False)
  assert (done.returncode, done.stderr) == (0, "")
  command = SBATCH.read_text().split("srun ")[-1]
  keys = KEY.findall(command)
  assert keys[0] == "config=configs/base.yml"
  assert load_config(["config=base", *keys[1:]]).mesh.num_simulated_devices == 0


def test_the_sbatch_script_asks_slurm_in_lines_that_it_reads():
  # SLURM stops reading at the first command.
  lines = SBATCH.read_text().splitlines()
  first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
  options = [line for line in lines if line.startswith("#SBATCH ")]
  assert options == [line for line in lines[:first] if line.startswith("#SBATCH --")]
  assert "#SBATCH --signal=TERM@120" in options


def test_the_jobset_places_its_processes():
  jobset = yaml.safe_load(JOBSET.read_text())
  (job,) = jobset["spec"]["replicatedJobs"]
  spec = job["template"]["spec"]
  (container,) = spec["template"]["spec"]["containers"]
  assert spec["parallelism"] == spec["completions"]
  variables = {one["name"]: one["value"] for one in container["env"]}
  assert container["command"][:3] == ["python", "-m", "maxbatch.train"]
  config = load_config(container["command"][3:])
  name = jobset["metadata"]["name"]
  for number in range(spec["parallelism"]):
    pod = variables | {"JOB_COMPLETION_INDEX": str(number)}
    assert stated_processes(config.distributed, pod) == StatedProcesses(
      address=f"{name}-{job['name']}-0-0.{name}:1234",
      num_processes=spec["parallelism"],
      process_id=number,
      sign=f"JAX_PROCESS_COUNT={spec['parallelism']}",
    )
