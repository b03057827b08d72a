"""Parameters of the published checkpoints, counted by their publishers."""

PUBLISHED_PARAMETERS = {
  "deepseek2-16b": 15_706_484_224,
  # With the 14,848 biases of its routers, and without the layer that predicts a second token.
  "deepseek3-671b": 671_026_404_352 + 58 * 256,
  "gemma2-2b": 2_614_341_888,
  "gemma2-9b": 9_241_705_984,
  "gemma3-1b": 999_885_952,
  # Of 4,300,079,472 with the parts that see.
  "gemma3-4b": 3_880_263_168,
  "gpt-oss-120b": 116_829_156_672,
  "gpt-oss-20b": 20_914_757_184,
  "gpt2-small": 124_439_808,
  "llama2-7b": 6_738_415_616,
  "llama3-8b": 8_030_261_248,
  "llama3.1-8b": 8_030_261_248,
  "llama3.2-1b": 1_235_814_400,
  "llama3.2-3b": 3_212_749_824,
  "mistral-7b": 7_241_732_096,
  "mixtral-8x7b": 46_702_792_704,
  "olmo2-1b": 1_484_916_736,
  "olmo2-7b": 7_298_617_344,
  "olmoe-1b-7b": 6_919_161_856,
  "qwen2.5-0.5b": 494_032_768,
  "qwen2.5-7b": 7_615_616_512,
  "qwen3-0.6b": 596_049_920,
  "qwen3-30b-a3b": 30_532_122_624,
  "qwen3-8b": 8_190_735_360,
  "smollm-135m": 134_515_008,
  "smollm-360m": 361_821_120,
}
