"""The parts of `examples/pretrain_gpt.py`: a pretraining script for Megatron-core models with
tensor, pipeline, data and Ulysses parallelism, small enough to read in one sitting.

    config      what can be set; YAML and command line
    misread     what is wrong with options and YAML, key by key
    preflight   everything that can be checked before a process group or a GPU is touched
    indexed     reading and checking Megatron's .bin/.idx files without Megatron
    data        Megatron's GPTDataset, and which rank reads which sample
    model       the Megatron model, optimizer and scheduler that a config describes
    checkpoint  iter_XXXXXXX/ directories that are either whole or not there
    trainer     the loop
    log         the log line, JSONL, tensorboard and the loss plot
"""
