"""Several real processes of one run: they join, train as one, and process 0 alone speaks."""

import pytest
from processes import small_run
from several_processes import records, train

SMALL = ["steps=4", "num_simulated_devices=2", "generate_length=2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Run folders of the same run in one and in two processes, and how the two ended."""
  folder = tmp_path_factory.mktemp("runs")
  arguments = [*small_run(folder, folder / "words.txt", folder / "cache"), *SMALL]
  alone = train(1, [*arguments, "run_name=alone"])
  both = train(2, [*arguments, "run_name=both"])
  assert [one.exit_code for one in (*alone, *both)] == [0, 0, 0], (alone, both)
  return folder / "alone", folder / "both", both


def test_two_processes_train_as_one(runs):
  alone, both, _ = runs
  assert len(records(alone)) == 5
  for one, two in zip(records(alone), records(both), strict=True):
    assert one == pytest.approx(two, rel=1e-6)


def test_process_0_alone_speaks(runs):
  _, _, (first, second) = runs
  assert first.output.startswith("Batch plan")
  assert "Finished after step 4" in first.output
  assert (second.output, second.errors) == ("", "")


def test_every_process_has_a_log(runs):
  _, folder, _ = runs
  logs = sorted((folder / "logs").iterdir())
  assert [log.name for log in logs] == ["process_00000.log", "process_00001.log"]
  assert all("Finished after step 4" in log.read_text() for log in logs)
