#!/usr/bin/env python3
"""Runs a command; if it is still running after a while, says where its GPU is: which kernel, and at which instructions how many threads stand. For a
kernel that does not end and whose waits have no name (those inside a CTA: see src/cuda/sync/wait.cuh). The driver writes a dump of the GPU, which cuda-gdb
(part of the CUDA toolkit) reads; build the kernels with -DMOK_CUDA_LINES=ON and places have lines of the source. The command is ended afterwards.

  tools/gpu_where.py [--after 30] [--keep FILE] [--lines 4] -- COMMAND [ARGUMENT ...]

Exit status: the command's if it ended by itself, else 124 (as timeout(1)); 2 if nothing could be found out.
"""
import argparse
import collections
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

PATIENCE = 90  # seconds for the driver to write a dump


def start(command, folder):
    """The command, with a driver that writes a dump when asked through a pipe."""
    env = dict(os.environ, CUDA_ENABLE_USER_TRIGGERED_COREDUMP="1", CUDA_COREDUMP_PIPE=os.path.join(folder, "pipe.%p"),
               CUDA_COREDUMP_FILE=os.path.join(folder, "dump.%p"), CUDA_COREDUMP_SHOW_PROGRESS="1",
               CUDA_COREDUMP_GENERATION_FLAGS="skip_global_memory,skip_local_memory,skip_abort")
    return subprocess.Popen(command, env=env, start_new_session=True)


def files(folder, kind):
    return sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.startswith(kind) and ".tmp" not in name)


def trigger(folder):
    """Asks every process of the command that has a GPU, and waits until their dumps no longer grow."""
    pipes = files(folder, "pipe")
    for pipe in pipes:
        try:
            handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.write(handle, b"1")
            os.close(handle)
        except OSError as why:
            print(f"gpu_where: {pipe}: {why}", file=sys.stderr)
    sizes, end = None, time.time() + PATIENCE
    while pipes and time.time() < end:
        time.sleep(2)
        now = [os.path.getsize(dump) for dump in files(folder, "dump")]
        if now and now == sizes:
            break
        sizes = now
    return files(folder, "dump")


def debugger(dump, commands):
    """What cuda-gdb prints."""
    arguments = [part for command in commands for part in ("-ex", command)]
    done = subprocess.run(["cuda-gdb", "-nx", "-batch", "-ex", "set pagination off", "-ex", "set width 0", "-ex", f"target cudacore {dump}", *arguments],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    return done.stdout


def places(text):
    """{address of an instruction: [threads there, who is first]} out of `info cuda threads`: from here to there, how many, where, in every line."""
    found = collections.defaultdict(lambda: [0, ""])
    for ends, count, address in re.findall(r"((?:\(\d+,\d+,\d+\)\s+){4,})(\d+)\s+(0x[0-9a-f]+)", text):
        entry, ends = found[int(address, 16)], ends.split()
        entry[0] += int(count)
        entry[1] = entry[1] or "first: block %s, thread %s" % tuple(ends[len(ends) // 2 - 2:len(ends) // 2])
    return found


def tell(dump, lines):
    kernels = debugger(dump, ["info cuda kernels", "info cuda threads"])
    where = places(kernels)
    print(f"== {os.path.basename(dump)} ==")
    if not where:
        print(kernels)
        return False
    for row in kernels.splitlines():
        if re.search(r"Kernel|mok_", row):
            print(row)
    order = sorted(where, key=lambda address: -where[address][0])
    asked = [command for address in order for command in (f"echo \\n@{address:#x}\\n", f"info symbol {address:#x}", f"info line *{address:#x}",
                                                         f"x/{2 * lines + 1}i {address - 16 * lines:#x}")]
    answers = dict(re.findall(r"^@(0x[0-9a-f]+)\n(.*?)(?=^@0x|\Z)", debugger(dump, asked), re.M | re.S))
    for address in order:
        count, first = where[address]
        print(f"\n{count} threads at {address:#x} ({first})")
        print(answers.get(f"{address:#x}", "  ?").rstrip())
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--after", type=float, default=30, metavar="SECONDS", help="how long the command may run (default 30)")
    parser.add_argument("--keep", metavar="FILE", help="keep the dump")
    parser.add_argument("--lines", type=int, default=4, help="instructions shown before and after each place (default 4)")
    parser.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args()
    if not shutil.which("cuda-gdb"):
        sys.exit("gpu_where: there is no cuda-gdb in PATH; it is part of the CUDA toolkit")
    with tempfile.TemporaryDirectory() as folder:
        child = start(options.command, folder)
        try:
            return child.wait(options.after)
        except subprocess.TimeoutExpired:
            print(f"gpu_where: still running after {options.after:g} s", flush=True)
        told = [tell(dump, options.lines) for dump in trigger(folder)]
        if not told:
            print(f"gpu_where: the driver wrote no dump within {PATIENCE} s (is a GPU in use, and is the driver 12.5 or later?)")
        for dump in files(folder, "dump")[:1] if options.keep else []:
            shutil.copy(dump, options.keep)
        os.killpg(child.pid, signal.SIGKILL)
        return 124 if any(told) else 2


if __name__ == "__main__":
    sys.exit(main())
