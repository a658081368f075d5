"""The training job behind ``ragged-fsdp train``."""
