"""Writes configs/base.yml from the declarations in maxbatch/config/keys/.

python scripts/write_base_config.py
"""

from pathlib import Path

from maxbatch.config.schema import base_file

if __name__ == "__main__":
  path = Path(__file__).resolve().parent.parent / "configs" / "base.yml"
  path.write_text(base_file(), encoding="utf-8")
  print(f"wrote {path}")
