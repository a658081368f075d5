"""The runtime of ``fully_shard``, in rooms that import one way; docs/design.md says what each of them owns.

``construct -> runtime -> gather, reduce -> parts -> streams -> autograd``
"""
