"""Process groups of workers and sandboxes, to be killed with this process."""

# Ids of running groups. Code that ends this process by os._exit, without Python's clean-up, kills
# these groups first. If this process ends in another way, the groups end by themselves. Sandboxes
# and idle workers end when their connection to this process closes. A busy worker ends soon after
# its time limit.
process_groups: set[int] = set()
