"""A vocabulary by its model's name on the Hugging Face hub: downloaded once, and then from the cache."""

import collections
import dataclasses
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support import base
from vocabularies import END, huggingface

from maxbatch.data.tokenizers.libraries import build_huggingface
from maxbatch.data.tokenizers.vocabulary_file import is_hub_name
from maxbatch.errors import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"

PROGRAM = """
import sys
from maxbatch.config.load import load_config
from maxbatch.data.tokenizers.libraries import build_huggingface
from maxbatch.errors import UserError
for name in sys.argv[1:]:
  keys = ["config=base", "tokenizer_type=huggingface", f"tokenizer_path={name}"]
  try:
    found = build_huggingface(load_config(keys).data)
    print(f"{name}: {found.vocab_size} {found.eos_id} {found.decode(found.encode(b'a line'))}")
  except UserError as error:
    print(f"{name}: {error}")
"""


class Hub(http.server.ThreadingHTTPServer):
  """A stand-in for the hub: one model, one that is gated, and no other."""

  def __init__(self, files: dict[str, bytes]):
    super().__init__(("127.0.0.1", 0), _Handler)
    self.files = files
    self.downloads: collections.Counter[str] = collections.Counter()
    self.tokens: set[str | None] = set()
    threading.Thread(target=self.serve_forever, daemon=True).start()

  def __exit__(self, *args: Any) -> None:
    self.shutdown()
    super().__exit__(*args)


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  server: Any

  def do_GET(self) -> None:
    files, path = self.server.files, self.path.partition("?")[0]
    self.server.tokens.add(self.headers["Authorization"])
    name = path.rpartition("/")[2]
    if "gated" in path:
      self._say(403, {"X-Error-Code": "GatedRepo"}, b"{}")
    elif path == "/api/models/owner/model/revision/main":
      siblings = [{"rfilename": file} for file in files]
      about = {"id": "owner/model", "sha": COMMIT, "siblings": siblings}
      self._say(200, {}, json.dumps(about).encode())
    elif path == f"/api/models/owner/model/tree/{COMMIT}":
      listed = [
        {"type": "file", "path": file, "size": len(content), "oid": "0" * 40}
        for file, content in files.items()
      ]
      self._say(200, {}, json.dumps(listed).encode())
    elif path == f"/owner/model/resolve/{COMMIT}/{name}" and name in files:
      self.server.downloads[name] += self.command == "GET"
      tag = hashlib.sha1(files[name]).hexdigest()
      self._say(200, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}, files[name])
    else:
      self._say(404, {"X-Error-Code": "RepoNotFound"}, b"{}")

  do_HEAD = do_GET

  def _say(self, status: int, headers: dict[str, str], content: bytes) -> None:
    self.send_response_only(status)
    for name, value in {**headers, "Content-Length": str(len(content))}.items():
      self.send_header(name, value)
    self.end_headers()
    if self.command == "GET":
      self.wfile.write(content)

  def log_message(self, format: str, *args: Any) -> None: ...


def built(place: Path, *names: str, **environment: str) -> dict[str, str]:
  """What a process of its own makes of each name: the library reads its variables when imported."""
  result = subprocess.run(
    [sys.executable, "-c", PROGRAM, *names],
    capture_output=True,
    text=True,
    check=True,
    cwd=place,
    env=os.environ
    | {"HF_HOME": str(place / "hf"), "PYTHONPATH": os.pathsep.join(sys.path)}
    | environment,
  )
  return dict(line.split(": ", 1) for line in result.stdout.splitlines())


def test_a_name_is_looked_up_once_and_then_found_offline(tmp_path):
  folder = huggingface(tmp_path / "made", bos_token=END, eos_token=END)
  files = {path.name: path.read_bytes() for path in folder.iterdir()}
  with Hub(files | {"model.safetensors": b"large"}) as hub:
    url = f"http://127.0.0.1:{hub.server_address[1]}"
    online = built(tmp_path, "owner/model", "owner/none", "gated/model", HF_ENDPOINT=url)
  assert online["owner/model"] == "300 0 a line"
  assert hub.downloads == {"tokenizer.json": 1, "tokenizer_config.json": 1}
  given = "tokenizer_type=huggingface tokenizer_path="
  assert online["owner/none"].startswith(
    f"{given}owner/none: there is no such file or folder here, and as a name on the Hugging Face hub it "
    "cannot be read ("
  )
  assert f"it is gated: accept its conditions at {url}/gated/model" in online["gated/model"]
  assert "HF_TOKEN" in online["gated/model"]

  offline = built(tmp_path, "owner/model", "owner/other", HF_HUB_OFFLINE="1")
  assert offline["owner/model"] == "300 0 a line"
  missing = offline["owner/other"]
  assert f"it is not in the cache {tmp_path}/hf/hub, and cannot be downloaded (" in missing
  assert "offline mode is enabled" in missing
  assert "hf download owner/other --include 'tokenizer*'" in missing


def test_without_the_library_a_name_is_no_folder_and_says_what_to_install(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  keys = {"tokenizer_type": "huggingface", "tokenizer_path": "owner/model"}
  with pytest.raises(UserError) as caught:
    build_huggingface(dataclasses.replace(base().data, **keys))
  assert "there is no such file or folder here" in str(caught.value)
  assert "needs the package huggingface_hub" in str(caught.value)
  assert "pip install 'maxbatch[hf]'" in str(caught.value)


@pytest.mark.parametrize(
  ("path", "is_name"),
  [
    ("meta-llama/Llama-3.1-8B", True),
    ("gpt2", True),
    ("my_model/tokenizer.json", False),
    ("/models/llama", False),
    ("./model", False),
    ("a/b/c", False),
    ("tokenizer.model", False),
    ("", False),
  ],
)
def test_which_paths_may_be_names(path, is_name):
  assert is_hub_name(path) == is_name
