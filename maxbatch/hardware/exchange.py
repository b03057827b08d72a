"""Values of all processes through the store in process 0, see coordinator.py.

No device takes part, so that any thread may ask for them, whatever the devices do meanwhile.
"""

import concurrent.futures
import itertools
import json
import threading
from typing import Any

import jax

from maxbatch.hardware.coordinator import Coordinator

_GLANCE_SECONDS = 1.0
"""Between looks whether the answer is still wanted. A process that is gone is found by its silence
(watch.py), and the run ends then."""
_PAUSE_SECONDS = 0.05

_exchanges = itertools.count()


class Exchange:
  """Exchanges one after the other; all processes make the same ones, in the same order."""

  def __init__(self) -> None:
    """All processes have as many exchanges, begun in the same order."""
    self._name, self._numbers = f"exchange/{next(_exchanges)}", itertools.count()
    self._given_up = threading.Event()

  def __call__(self, value: Any) -> list[Any]:
    """Every process's value, in all processes, by the number of the process.

    Args:
      value: plain values that JSON can represent.

    Raises:
      CancelledError: it is given up.
    """
    text = json.dumps(value)
    if jax.process_count() == 1:
      return [json.loads(text)]
    store, number = Coordinator(), next(self._numbers)
    folder = f"{self._name}/{number}"
    if store.process:
      store.put(f"{folder}/{store.process}", text)
      return json.loads(self._awaited(store, f"{folder}/all"))
    others = [self._awaited(store, f"{folder}/{each}") for each in range(1, store.num_processes)]
    found = [json.loads(each) for each in (text, *others)]
    store.put(f"{folder}/all", json.dumps(found))
    # Whoever has come here has what was exchanged before.
    store.remove(f"{self._name}/{number - 1}")
    return found

  def give_up(self) -> None:
    """Ends a call under way in another thread, and all later ones."""
    self._given_up.set()

  def _awaited(self, store: Coordinator, key: str) -> str:
    while not self._given_up.is_set():
      found = store.wait_for(key, _GLANCE_SECONDS)
      if found is not None:
        return found
      self._given_up.wait(_PAUSE_SECONDS)  # It answers at once where process 0 is gone.
    raise concurrent.futures.CancelledError
