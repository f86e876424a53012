"""Process groups of workers and sandboxes, to be killed with this process."""

# Ids of running groups. Code that ends this process by os._exit, without Python's clean-up, kills
# them first. After any other end they notice by themselves, for example by a closed pipe.
process_groups: set[int] = set()
