"""The choice of micro_batch_size and num_pipeline_microbatches: candidates, search, what is remembered."""
