"""What fine-tuning costs: optimizer state on the host, adapters on a frozen base."""
