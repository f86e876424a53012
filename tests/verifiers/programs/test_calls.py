"""The system calls that programs may make: numbers, and that nothing else gets through."""

import dataclasses
import pathlib
import re

import pytest
from support.sandboxes import LIMITS, needs_namespaces, run

from gspo_jax.verifiers.programs.sandbox import calls

HEADERS = (
  pathlib.Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
  pathlib.Path("/usr/include/asm-generic/unistd.h"),  # AArch64's
)
NUMBERS = {
  **calls.ALLOWED,
  **{name: numbers for name, (numbers, _, _) in calls.ALLOWED_VALUES.items()},
  **dict(clone=calls.CLONE, clone3=calls.CLONE3, sendto=calls.SENDTO),
}


@pytest.mark.parametrize("column", [0, 1], ids=["x86-64", "aarch64"])
def test_numbers_are_the_kernel_s(column):
  if not HEADERS[column].exists():
    pytest.skip("no kernel headers here")
  definitions = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[column].read_text())
  header = {name: int(number) for name, number in definitions}
  header.setdefault("newfstatat", header.get("fstatat"))
  for name, numbers in NUMBERS.items():
    if name in header or numbers[column] is not None:
      assert numbers[column] == header[name], name


@needs_namespaces
def test_every_other_call_is_refused():
  """Tries each number outside of the table, future ones included. 335 and 336 are the kernel's own
  ends of probes: it kills whoever calls them, and asks no filter."""
  program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
allowed = ALLOWED[os.uname().machine]
for number in sorted({*range(600), 1 << 30, (1 << 30) + 41} - {335, 336, *allowed}):
  found = libc.syscall(number, 0, 0, 0, 0, 0, 0)
  if found != -1 or ctypes.get_errno() not in (1, 38):
    print(number, found, ctypes.get_errno())
print("done")
"""
  allowed = {
    machine: [numbers[column] for numbers in NUMBERS.values()]
    for column, machine in enumerate(("x86_64", "aarch64"))
  }
  assert run(program.replace("ALLOWED", repr(allowed), 1))["stdout"] == "done\n"


ATTEMPTS = {
  "a lease": "fcntl.fcntl(host, 1024, fcntl.F_RDLCK)",
  "notices of a directory": "fcntl.fcntl(os.open('/usr', os.O_RDONLY), 1026, 2)",
  "a lock": "fcntl.flock(host, fcntl.LOCK_SH)",
  "a lock of a part": "fcntl.lockf(open('mine', 'w'), fcntl.LOCK_EX)",
  "a lock of an open file": "fcntl.fcntl(host, 37, bytes(32))",
  "an owner of signals": "fcntl.fcntl(host, fcntl.F_SETOWN, 1)",
  "a watch on a directory": "call('inotify_init')",
  "a newer watch": "call('inotify_init1', 0)",
  "a watch on a file system": "call('fanotify_init', 0, 0)",
  "flags of an inode": "fcntl.ioctl(host, 0x40086602, bytes(8))",
  "reading flags": "fcntl.ioctl(host, 0x80086601, bytes(8))",
  "typing into a terminal": "fcntl.ioctl(0, 0x5412, b'x')",
  "setting attributes": "os.setxattr('mine', 'user.x', b'x')",
  "removing attributes": "os.removexattr('mine', 'user.x')",
  "a socket": "socket.socket(socket.AF_UNIX)",
  "a network socket": "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
  "a pair of another kind": "socket.socketpair(socket.AF_TIPC)",
  "another address for a pair": "pair.connect('\\0somebody')",
  "sending to an address": "pair.sendto(b'x', '\\0somebody')",
  "sending a descriptor": "socket.send_fds(pair, [b'x'], [0])",
  "a name for a pair": "pair.bind('\\0mine')",
  "receiving descriptors": "pair.recvmsg(1, 100)",
  "reserving the disk": "os.posix_fallocate(os.open('mine', os.O_RDWR), 0, 1 << 30)",
  "reserving beyond the end": "call('fallocate', os.open('mine', os.O_RDWR), 1, 0, 1 << 20)",
  "memory with a name": "os.memfd_create('x')",
  "shared memory": "call('shmget', 0, 4096, 0o1666)",
  "writing out the host's files": "os.sync() or call('sync')",
  "a process": "os.fork()",
  "a program in a process of its own": "subprocess.run(['/usr/bin/env'])",
  "a user namespace": "call('unshare', 0x10000000)",
  "a program": "os.execv('/usr/bin/env', ['env'])",
  "a signal": "os.kill(os.getpid(), 0)",
  "another's limits": "resource.prlimit(1, resource.RLIMIT_CPU)",
  "a priority": "os.setpriority(os.PRIO_PROCESS, 0, 5)",
  "a processor": "os.sched_setaffinity(0, [0])",
  "outliving the keeper": "call('prctl', 1, 0)",
}


@needs_namespaces
def test_what_reaches_others_is_refused():
  program = f"""
import ctypes, fcntl, os, resource, socket, subprocess
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
  if getattr(libc, name)(*arguments) < 0:
    raise OSError(ctypes.get_errno(), name)
host, (pair, _) = open(os.__file__), socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
open("mine", "w").write("x")
for name, attempt in {ATTEMPTS!r}.items():
  if name == "writing out the host's files":
    continue  # sync returns nothing: the test above has its number
  try:
    eval(attempt)
    print(name, "is open")
  except OSError as error:
    if error.errno not in (1, 12, 38):  # not permitted, no such call; ENOMEM of an old C library
      print(name, error)
print("done")
"""
  assert run(program)["stdout"] == "done\n"


@needs_namespaces
@pytest.mark.parametrize(
  "start",
  ["_thread.start_new_thread(time.sleep, (30,))",
   "threading.Thread(target=time.sleep, args=(30,), daemon=True).start()"],
)  # fmt: skip
def test_threads_are_counted_however_they_are_started(start):
  program = f"""
import _thread, threading, time
_thread.stack_size(1 << 15)
started = 0
try:
  for _ in range(3000):
    {start}
    started += 1
except RuntimeError:
  pass
print(started)
"""
  limits = dataclasses.replace(LIMITS, memory_bytes=1 << 30)
  assert 1 <= int(run(program, limits)["stdout"]) <= LIMITS.threads


@needs_namespaces
def test_nothing_of_the_host_can_be_looked_at():
  file = pathlib.Path(__file__)
  program = f"""
import os
for path in ({str(file)!r}, {str(file.parents[3])!r}, "/proc/1", "/etc/passwd", "/var", "/home"):
  print(os.path.lexists(path))
"""
  assert set(run(program)["stdout"].split()) == {"False"}
