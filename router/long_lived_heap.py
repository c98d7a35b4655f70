"""Keeps the garbage collector off what lives as long as the router does."""

import gc

# New containers between two looks at the young ones. At Python's 700 every request has all streams' objects
# looked at, and hardly any of them is garbage that only the collector finds.
_YOUNG_OBJECTS = 20_000


def settle() -> None:
    """What is there now is never looked at again: call it once, when the router has started."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
