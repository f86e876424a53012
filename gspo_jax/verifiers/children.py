"""Process groups to end together with this process."""

# Session leaders of workers and sandboxes. Code that ends this process without Python's clean-up
# (os._exit) kills these groups first. Otherwise they notice the end themselves.
process_groups: set[int] = set()
