"""Which layers see no farther than a window."""

import numpy as np

from maxbatch.config.schema import ModelConfig
from maxbatch.hugging_face.model_keys import layer_types


def sliding_layers(config: ModelConfig) -> np.ndarray:
  """bool[L]: the layers of sliding attention; none where sliding_window_size=0."""
  num_layers, has_window = config.base_num_decoder_layers, config.sliding_window_size > 0
  kinds = layer_types(config.layer_types, num_layers) or ("sliding_attention",) * num_layers
  return np.array([has_window and kind == "sliding_attention" for kind in kinds])
