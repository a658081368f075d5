"""The runtime of ``fully_shard``, in rooms that import one way: build -> runtime -> gather, reduce -> parts
-> streams.

See docs/design.md for what each of them owns.
"""
