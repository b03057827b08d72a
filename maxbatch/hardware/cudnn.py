"""The version of cuDNN where it is not installed, as on a machine that only compiles for GPUs.

While it traces cuDNN's attention, jax asks the library for its version, and fails where there is none. The
program holds no code of the library, only a call that names what is asked of it.
"""

from jax._src.cudnn import fused_attention_stablehlo
from jax._src.lib import cuda_versions


def assume_cudnn() -> None:
  """Lets jax trace for the version that its CUDA plugin was built with, unless cuDNN is here.

  There is no public way: without this the wheels of cuDNN and cuBLAS, 1.4 GB, would have to be
  installed for a number.
  """
  try:
    fused_attention_stablehlo.check_cudnn_version()
  except RuntimeError:
    if cuda_versions is not None:
      fused_attention_stablehlo.check_cudnn_version = cuda_versions.cudnn_build_version
