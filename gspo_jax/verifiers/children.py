"""Processes that end with this one."""

# Leaders of the sessions of workers and sandboxes. Code that ends this process without Python's
# clean-up (os._exit) kills these groups first; otherwise they notice by themselves.
process_groups: set[int] = set()
