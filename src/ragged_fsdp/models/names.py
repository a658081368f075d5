"""The name a parameter has in the plain model, whatever has been wrapped around its modules."""

__all__ = ["plain_name"]

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # activation checkpointing, torch.compile


def plain_name(name: str) -> str:
    """``layers.0._checkpoint_wrapped_module.norm.weight`` is ``layers.0.norm.weight``."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
